// The program tree: runs, their branches, and the calls of each, in order.

import { count, h, note, number, oneLine, seconds, show } from "./dom.js";
import { runsOf, totals } from "./runs.js";

const MOST_CALLS = 2000;
const OPEN_RUNS = 12;

/** The branches of a run: {branch, calls, children}, each below the one it was forked from. */
function branches(calls) {
  const root = { branch: [], calls: [], children: new Map() };
  for (const call of calls) {
    let at = root;
    call.branch.forEach((step, depth) => {
      if (!at.children.has(step)) {
        at.children.set(step, { branch: call.branch.slice(0, depth + 1), calls: [], children: new Map() });
      }
      at = at.children.get(step);
    });
    at.calls.push(call);
  }
  return root;
}

const first = (node) =>
  Math.min(node.calls[0]?.at ?? Infinity, ...[...node.children.values()].map(first));

function callLine(call, chosen, choose, longest) {
  const text = call.state === "failed" ? `${call.error.type}: ${call.error.message}` : call.texts.join(" ⏐ ");
  const share = (call.seconds ?? 0) / (longest || 1);
  return h(
    "button",
    {
      type: "button",
      class: `call ${call.state}${call.replayed ? " replayed" : ""}`,
      "aria-pressed": chosen === call.id ? "true" : "false",
      data: { call: call.id },
      on: { click: () => choose(call) },
    },
    h("span", { class: `badge ${call.kind}` }, call.kind),
    h("span", { class: "name" }, oneLine(call.label, 40)),
    h("span", { class: "said" }, oneLine(text)),
    h("span", { class: "tokens", title: "tokens generated" }, call.count("completion_tokens") || ""),
    h("span", { class: "took" }, call.state === "running" ? "…" : seconds(call.seconds)),
    h("span", { class: "share", "aria-hidden": "true" }, h("i", { style: { width: `${share * 100}%` } })),
  );
}

function branchList(node, context) {
  const items = [
    ...node.calls.map((call) => [call.at, () => h("li", {}, callLine(call, context.chosen, context.choose, context.longest))]),
    ...[...node.children.values()].map((child) => [
      first(child),
      () =>
        h("li", {}, h("details", { open: true, class: "branch" },
          h("summary", {}, `branch ${child.branch.join(".")}`, h("small", {}, count(callsOf(child).length, "call"))),
          branchList(child, context))),
    ]),
  ];
  items.sort((a, b) => a[0] - b[0]);
  return h("ul", { class: "tree" }, items.map(([, make]) => make()));
}

const callsOf = (node) => [...node.calls, ...[...node.children.values()].flatMap(callsOf)];

export function showTree(view, state) {
  const calls = state.calls.slice(0, MOST_CALLS);
  const runs = runsOf(calls);
  const several = new Set(calls.map((call) => call.file)).size > 1;
  const longest = calls.reduce((most, call) => Math.max(most, call.seconds ?? 0), 0);
  const context = { chosen: state.chosen?.id, choose: state.choose, longest };
  show(
    view,
    ...(calls.length ? [] : [note(state.empty)]),
    ...(calls.length < state.calls.length
      ? [note(`The first ${number(MOST_CALLS)} of ${number(state.calls.length)} calls; search, or choose a run, for others.`)]
      : []),
    ...runs.map((run, at) => {
      const sums = totals(run.calls);
      const isOpen = state.isOpen(run.key, at < OPEN_RUNS);
      const box = h("details", { class: "run", open: isOpen },
        h("summary", {},
          h("b", {}, run.program || "(no name)"),
          run.index === null ? null : h("span", { class: "chip" }, `item ${run.index}`),
          several ? h("span", { class: "chip" }, run.file.name) : null,
          sums.failed ? h("span", { class: "chip bad" }, `${sums.failed} failed`) : null,
          h("small", {}, `${count(sums.calls, "call")} · ${count(sums.generated, "token")} · ${seconds(sums.seconds)}`)),
        isOpen ? branchList(branches(run.calls), context) : null);
      box.addEventListener("toggle", () => {
        state.setOpen(run.key, box.open);
        if (box.open && box.childElementCount === 1) box.append(branchList(branches(run.calls), context));
      });
      return box;
    }),
  );
}

const TOKENS = [["prompt", "prompt_tokens"], ["cached", "cached_tokens"], ["generated", "completion_tokens"],
  ["jumped", "jumped_tokens"], ["decode steps", "decode_steps"], ["retractions", "num_retractions"]];

/** One call, whole: facts, where its time went, prompt, reply. */
export function showDetail(panel, call) {
  if (!call) {
    show(panel, note("Choose a call to see its prompt, its reply and where its time went."));
    return;
  }
  const facts = [
    ["program", call.program], ["branch", call.branch.join(".")], ["item", call.index],
    ["source", call.source?.split(/[\\/]/).at(-1), call.source], ["backend", call.backend],
    ["finish", call.meta.finish_reason?.type], ["took", seconds(call.seconds)],
    ["first token", call.first === null ? null : seconds(call.first)],
    ["constraint", call.request.constraint ? constraint(call) : null],
    ["replayed", call.replayed ? "from a record" : null],
  ].filter(([, value]) => value !== null && value !== undefined && value !== "");
  const counts = TOKENS.filter(([, key]) => call.meta[key]).map(([title, key]) => [title, number(call.count(key))]);
  show(
    panel,
    h("h2", {}, h("span", { class: `badge ${call.kind}` }, call.kind), " ", oneLine(call.label, 60)),
    call.error ? h("div", { class: "error" }, h("b", {}, call.error.type ?? "failed"), " ", call.error.message ?? "") : null,
    h("dl", {}, facts.map(([title, value, whole]) => [h("dt", {}, title), h("dd", { title: whole }, String(value))])),
    counts.length
      ? h("div", { class: "counts" }, counts.map(([title, value]) => h("div", {}, h("b", {}, value), h("small", {}, title))))
      : null,
    phases(call),
    ...prompt(call),
    ...reply(call),
    h("details", { class: "raw" }, h("summary", {}, "as it was recorded"),
      h("pre", {}, JSON.stringify({ request: call.request, reply: call.reply }, null, 1).slice(0, 100_000))),
  );
}

function constraint(call) {
  const { kind, spec } = call.request.constraint;
  return `${kind}: ${oneLine(String(spec ?? ""), 160)}`;
}

function phases(call) {
  const list = call.phases;
  const total = list.at(-1)?.[2] || 1;
  return h("div", { class: "phases" },
    h("div", { class: "strip" }, list.map(([name, from, to]) =>
      h("i", { class: `phase ${name}`, style: { width: `${((to - from) / total) * 100}%` }, title: `${name}: ${seconds(to - from)}` }))),
    h("div", { class: "legend" }, list.map(([name, from, to]) =>
      h("span", {}, h("i", { class: `phase ${name}` }), `${name} ${seconds(to - from)}`))));
}

function prompt(call) {
  if (call.request.arguments) {
    return [h("h3", {}, "Arguments"), h("pre", { class: "text" }, JSON.stringify(call.request.arguments, null, 1))];
  }
  if (!call.messages.length) return [];
  return [
    h("h3", {}, "Prompt"),
    ...call.messages.filter((one) => one.text || !one.open).map((one) =>
      h("div", { class: "message", data: { role: one.role } }, one.role === "raw" ? null : h("small", {}, one.role), h("div", { class: "text" }, one.text))),
  ];
}

function reply(call) {
  if (call.scores.length) {
    const best = Math.max(...call.scores.map((one) => one.mean));
    return [
      h("h3", {}, "Choices"),
      h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "choice"), h("th", {}, "mean log-probability"), h("th", {}, "tokens"))),
        h("tbody", {}, call.scores.map((one) =>
          h("tr", { class: one.best ? "best" : "" }, h("td", {}, one.text),
            h("td", { class: "number" }, h("span", { class: "meter" }, h("i", { style: { width: `${Math.exp(one.mean - best) * 100}%` } })), one.mean.toFixed(3)),
            h("td", { class: "number" }, one.tokens))))),
    ];
  }
  if (!call.texts.length) return call.state === "running" ? [note("It runs.")] : [];
  const tokens = call.texts.length === 1 ? call.tokens : [];
  return [
    h("h3", {}, call.texts.length > 1 ? `Replies (${call.texts.length})` : call.request.arguments ? "Result" : "Reply"),
    ...call.texts.map((text) => h("div", { class: "message reply" }, h("div", { class: "text" },
      tokens.length
        ? tokens.map((one) => h("span", { class: `token ${look(one)}`, title: tokenTitle(one) }, one.text))
        : text))),
  ];
}

/** 0 (sure) to 4 (a guess). */
const level = (probability) =>
  probability === null ? 0 : probability > 0.9 ? 0 : probability > 0.6 ? 1 : probability > 0.3 ? 2 : probability > 0.1 ? 3 : 4;

/** How a token is marked: by how sure the model was of it, or as forced, when it had no choice. */
export const look = (token) => (token.origin === "forced" ? "forced" : `p${level(token.probability)}`);

function tokenTitle(one) {
  const share = (value) => (value === null ? "?" : `${(value * 100).toFixed(1)} %`);
  return [`${JSON.stringify(one.text)} ${share(one.probability)} ${one.origin}`.trimEnd(),
    ...one.others.map((other) => `${JSON.stringify(other.text)} ${share(other.probability)}`)].join("\n");
}
