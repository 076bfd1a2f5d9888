// Two runs side by side: the calls at the same position of the program, and how their answers differ.

import { h, note, number, oneLine, percent, seconds, show } from "./dom.js";
import { runsOf, totals } from "./runs.js";

const MOST_ROWS = 1000;

/** The calls of a run by their position in the program. Runs of a file are numbered; a single run has no item. */
function places(unit) {
  const byKey = new Map();
  const seen = new Map();
  for (const run of runsOf(unit.calls)) {
    const turn = seen.get(run.program) ?? 0;
    seen.set(run.program, turn + 1);
    const which = unit.single ? "" : run.index ?? turn;
    for (const call of run.calls) {
      let key = JSON.stringify([run.program, which, call.branch, call.step, call.kind]);
      while (byKey.has(key)) key += "'"; // calls of one step, such as those of a tool loop
      byKey.set(key, call);
    }
  }
  return byKey;
}

/** What both begin and end with, and what is between: [same, mine, same] for each. */
function difference(a, b) {
  const most = Math.min(a.length, b.length);
  let front = 0;
  while (front < most && a[front] === b[front]) front += 1;
  let back = 0;
  while (back < most - front && a[a.length - 1 - back] === b[b.length - 1 - back]) back += 1;
  const cut = (text) => [text.slice(0, front), text.slice(front, text.length - back), text.slice(text.length - back)];
  return [cut(a), cut(b)];
}

const textOf = (call) =>
  !call ? "" : call.state === "failed" ? `${call.error.type}: ${call.error.message}` : call.texts.join("\n");

function cell(call, parts) {
  if (!call) return h("td", { class: "dim" }, "no such call");
  return h("td", { class: `text ${call.state}` }, parts[0], parts[1] ? h("mark", {}, parts[1]) : "", parts[2]);
}

function change(a, b) {
  if (!a || !b) return "";
  const ratio = b / a - 1;
  return Math.abs(ratio) < 0.005 ? "" : ` ${ratio > 0 ? "+" : "−"}${percent(Math.abs(ratio))}`;
}

function summary(a, b) {
  const [one, two] = [totals(a.calls), totals(b.calls)];
  const rows = [["calls", "calls", number], ["failed", "failed", number], ["seconds", "time", seconds],
    ["prompt", "prompt tokens", number], ["cached", "from the cache", number], ["generated", "tokens generated", number],
    ["jumped", "of them jumped", number]];
  return h("table", { class: "summary" },
    h("thead", {}, h("tr", {}, h("th", {}), ["A", "B", "B to A"].map((title) => h("th", { class: "number" }, title)))),
    h("tbody", {}, rows.map(([key, title, shown]) =>
      h("tr", {}, h("th", {}, title), h("td", { class: "number" }, shown(one[key])), h("td", { class: "number" }, shown(two[key])),
        h("td", { class: "number dim" }, change(one[key], two[key]))))));
}

export function showCompare(view, state) {
  const units = state.units;
  if (units.length < 2) {
    show(view, note("Two runs are needed: open another file (sglang-dsl view a.jsonl b.jsonl), or one with several runs."));
    return;
  }
  // Two files; of one file two runs.
  const whole = units.filter((one) => !one.single);
  const [first, second] = whole.length > 1 ? whole : units.filter((one) => one.single);
  const [a, b] = [units.find((one) => one.key === state.a) ?? first, units.find((one) => one.key === state.b) ?? second];
  const choice = (id, title, chosen) => h("label", {}, `${title} `, h("select", { id, on: { change: (event) => state.set({ [id]: event.target.value }) } },
    units.map((one) => h("option", { value: one.key, selected: one === chosen }, one.title))));
  const [mine, theirs] = [places(a), places(b)];
  const pairs = [...new Set([...mine.keys(), ...theirs.keys()])].map((key) => [mine.get(key), theirs.get(key)]);
  const matching = pairs.filter((pair) => pair.some((call) => call && state.matches(call)));
  const differing = matching.filter(([one, two]) => textOf(one) !== textOf(two) || !one || !two);
  const shown = state.onlyDifferent ? differing : matching;
  const rows = shown.slice(0, MOST_ROWS).map(([one, two]) => {
    const call = one ?? two;
    const [left, right] = one && two ? difference(textOf(one), textOf(two)) : [[textOf(one), "", ""], [textOf(two), "", ""]];
    const same = one && two && textOf(one) === textOf(two);
    return h("tr", { class: same ? "same" : "different", on: { click: () => state.choose(two ?? one) } },
      h("td", { class: "place" }, h("span", { class: `badge ${call.kind}` }, call.kind), " ", oneLine(call.label, 30),
        h("small", {}, [call.branch.length ? `branch ${call.branch.join(".")}` : "", call.index === null ? "" : `item ${call.index}`].filter(Boolean).join(", "))),
      cell(one, left), cell(two, right),
      h("td", { class: "number" }, one ? seconds(one.seconds) : "–"),
      h("td", { class: "number" }, two ? seconds(two.seconds) : "–", h("small", {}, one && two ? change(one.seconds, two.seconds) : "")));
  });
  show(
    view,
    h("div", { class: "bar tools" }, choice("a", "A", a), choice("b", "B", b),
      h("label", {}, h("input", { type: "checkbox", id: "only-different", checked: state.onlyDifferent, on: { change: (event) => state.set({ onlyDifferent: event.target.checked }) } }), " differences alone"),
      h("span", { class: "grow" }),
      h("small", { id: "differences" }, `${number(differing.length)} of ${number(matching.length)} calls differ`)),
    summary(a, b),
    shown.length > MOST_ROWS ? note(`The first ${number(MOST_ROWS)} are shown.`) : null,
    h("table", { class: "compare" },
      h("thead", {}, h("tr", {}, ["call", "A", "B", "A took", "B took"].map((title, at) => h("th", { class: at > 2 ? "number" : "" }, title)))),
      h("tbody", {}, rows)),
  );
}
