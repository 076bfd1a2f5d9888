// The timeline: one row per branch that had calls at the same time, one bar per call, coloured by what it waited for.

import { count, h, note, number, oneLine, s, seconds, show } from "./dom.js";
import { runsOf } from "./runs.js";

const MOST_CALLS = 2000;
const ROW = 22;
const LABEL = 190;
const PHASES = ["client", "compile", "queue", "prefill", "decode", "call", "replayed", "running", "failed"];
const MEANS = {
  client: "before the engine had it: the program, the network",
  compile: "compiling its constraint",
  queue: "waiting to be let in",
  prefill: "computing the prompt, until the first token",
  decode: "generating",
  call: "no parts are known",
  replayed: "answered from a record",
  running: "not answered yet",
  failed: "failed",
};

/** Rows of calls that do not overlap, each of one branch of one run. */
function rows(calls) {
  const lines = [];
  const several = new Set(calls.map((call) => call.file)).size > 1;
  for (const run of runsOf(calls)) {
    const byBranch = new Map();
    for (const call of run.calls) {
      const key = call.branch.join(".");
      if (!byBranch.has(key)) byBranch.set(key, []);
      const lanes = byBranch.get(key);
      const lane = lanes.find((one) => one.until <= call.at) ?? { calls: [], until: 0 };
      if (!lane.calls.length) lanes.push(lane);
      lane.calls.push(call);
      lane.until = call.at + (call.phases.at(-1)?.[2] ?? 0);
    }
    const title = `${run.program}${run.index === null ? "" : ` #${run.index}`}${several ? ` · ${run.file.name}` : ""}`;
    let isFirst = true;
    for (const [key, lanes] of byBranch) {
      lanes.forEach((lane, at) => {
        lines.push({ calls: lane.calls, title: isFirst ? title : "", branch: at ? "" : key && `branch ${key}`, begins: isFirst });
        isFirst = false;
      });
    }
  }
  return lines;
}

/**
 * Where a time lies, with long waits in which nothing ran cut short. times: [begin, end] of each call.
 * Gives span (after the cuts), position(time), and the breaks as {at: position, lasted}.
 */
function cut(times) {
  const busy = [];
  for (const [from, to] of [...times].sort((a, b) => a[0] - b[0])) {
    const last = busy.at(-1);
    if (last && from <= last.to) last.to = Math.max(last.to, to);
    else busy.push({ from, to });
  }
  const all = busy.reduce((sum, one) => sum + one.to - one.from, 0) || 1e-3;
  const short = all / 25;
  const breaks = [];
  let until = 0;
  let position = 0;
  for (const one of busy) {
    const gap = one.from - until;
    if (gap > all / 3) breaks.push({ at: position + short / 2, lasted: gap });
    position += gap > all / 3 ? short : gap;
    one.position = position;
    position += one.to - one.from;
    until = one.to;
  }
  const at = (time) => {
    let low = 0;
    let high = busy.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (busy[middle].from <= time) low = middle;
      else high = middle - 1;
    }
    return busy[low].position + time - busy[low].from;
  };
  return { span: position, position: at, breaks, busy };
}

/** Round steps of time, about eight over all: [time, position], where something runs. */
function ticks({ span, position, breaks, busy }) {
  const rough = span / 8;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((one) => one * power >= rough) * power;
  if (!breaks.length) return Array.from({ length: Math.floor(span / step) + 1 }, (_, at) => [at * step, at * step]);
  const marks = [];
  for (const one of busy) {
    // Where each stretch begins, and within it.
    if (!marks.length || one.position - marks.at(-1)[1] > step / 2) marks.push([one.from, one.position]);
    for (let time = Math.ceil(one.from / step) * step; time < one.to; time += step) {
      if (position(time) - marks.at(-1)[1] > step / 2) marks.push([time, position(time)]);
    }
  }
  return marks;
}

function bar(call, begins, start, scale, y, state) {
  const group = s("g", {
    class: `bar${state.chosen?.id === call.id ? " chosen" : ""}`, role: "button", tabindex: 0, data: { call: call.id },
    "aria-label": `${call.kind} ${call.label}`,
    on: { click: () => state.choose(call), keydown: (event) => event.key === "Enter" && state.choose(call) },
  });
  const parts = call.phases;
  const end = parts.at(-1)?.[2] ?? 0;
  for (const [name, from, to] of parts) {
    const width = Math.max((to - from) * scale, parts.length === 1 ? 2 : 0.3);
    group.append(s("rect", { class: `phase ${name}`, x: start + from * scale, y: y + 3, width, height: ROW - 6 }));
    if (name === "decode" && call.jumped) {
      group.append(s("rect", { class: "phase jump", x: start + from * scale, y: y + ROW - 8, width: width * call.jumped, height: 5 }));
    }
  }
  const width = Math.max(end * scale, 2);
  group.append(s("rect", { class: "frame", x: start, y: y + 2, width, height: ROW - 4, rx: 2 }));
  if (width > 36) group.append(s("text", { x: start + 4, y: y + ROW - 7 }, oneLine(call.label, Math.floor(width / 8))));
  const jump = call.jumped ? `\njump: ${call.count("jumped_tokens")} of ${call.count("completion_tokens")} tokens` : "";
  const lines = parts.map(([name, from, to]) => `${name}: ${seconds(to - from)}`).join("\n");
  group.append(s("title", {}, `${call.kind} ${call.label}, at ${seconds(begins)}\n${lines}${jump}`));
  return group;
}

export function showTimeline(view, state) {
  const calls = state.calls.slice(-MOST_CALLS);
  if (!calls.length) {
    show(view, note(state.empty));
    return;
  }
  // Each file from its own beginning: runs of different times lie below one another.
  const begins = new Map();
  for (const call of calls) begins.set(call.file, Math.min(begins.get(call.file) ?? Infinity, call.at));
  const began = (call) => begins.get(call.file);
  const time = cut(calls.map((call) => [call.at - began(call), call.at - began(call) + (call.phases.at(-1)?.[2] ?? 0)]));
  const lanes = rows(calls);
  const available = Math.max(320, view.clientWidth - LABEL - 64);
  const width = available * state.zoom;
  const scale = width / time.span;
  const height = lanes.length * ROW + 22;
  const label = (lane) => h("div", { class: lane.begins ? "begins" : "", title: `${lane.title} ${lane.branch}` },
    h("b", {}, oneLine(lane.title, 30)), " ", h("small", {}, lane.branch));
  const chart = s("svg", { class: "chart", width: width + 4, height, role: "img", "aria-label": "timeline" },
    ticks(time).map(([at, position]) => [
      s("line", { class: "tick", x1: position * scale, x2: position * scale, y1: 16, y2: height }),
      s("text", { class: "tick", x: position * scale + 2, y: 12 }, at ? seconds(at) : "0"),
    ]),
    time.breaks.map(({ at, lasted }) => s("g", {},
      s("line", { class: "break", x1: at * scale, x2: at * scale, y1: 0, y2: height }),
      s("title", {}, `${seconds(lasted)} in which nothing ran`))),
    lanes.map((lane, at) => lane.calls.map((call) => bar(call, call.at - began(call), time.position(call.at - began(call)) * scale, scale, 20 + at * ROW, state))));
  const scroller = h("div", { class: "scroller" }, chart);
  scroller.addEventListener("scroll", () => (state.scroll = scroller.scrollLeft));
  const used = new Set(calls.flatMap((call) => call.phases.map(([name]) => name)));
  const legend = PHASES.filter((name) => used.has(name)).map((name) =>
    h("span", { title: MEANS[name] }, h("i", { class: `phase ${name}` }), name));
  if (calls.some((call) => call.jumped)) {
    legend.push(h("span", { title: "the share of its tokens that a constraint forced: no step was made for them" }, h("i", { class: "phase jump" }), "jump"));
  }
  show(
    view,
    h("div", { class: "bar tools" },
      h("div", { class: "legend" }, legend),
      h("span", { class: "grow" }),
      h("small", {}, `${count(calls.length, "call")} in ${seconds(time.span)}${time.breaks.length ? ", waits cut short" : ""}`),
      h("button", { type: "button", title: "Show more time", on: { click: () => state.setZoom(state.zoom / 2) } }, "−"),
      h("button", { type: "button", title: "Show less time", on: { click: () => state.setZoom(state.zoom * 2) } }, "+")),
    calls.length < state.calls.length ? note(`The last ${number(MOST_CALLS)} of ${number(state.calls.length)} calls.`) : null,
    h("div", { class: "timeline" }, h("div", { class: "labels" }, lanes.map(label)), scroller),
  );
  scroller.scrollLeft = state.scroll;
}
