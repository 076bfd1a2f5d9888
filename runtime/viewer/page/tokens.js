// The token table: every generated token with its probability and what else it might have been.

import { h, note, number, percent, show, visible } from "./dom.js";
import { look } from "./tree.js";

const MOST_ROWS = 1000;
const ORIGINS = {
  sampled: "drawn from the model's distribution",
  forced: "the constraint left no other: appended without a step (jump-forward)",
  speculated: "guessed ahead, and confirmed by the step that verified it",
};
const ORDERS = [["order", "as generated"], ["unsure", "least probable first"]];

export function showTokens(view, state) {
  const calls = state.onlyChosen && state.chosen ? [state.chosen] : state.calls;
  const all = calls.flatMap((call) => call.tokens);
  const shown = all.filter((one) =>
    (!state.origin || one.origin === state.origin) &&
    (one.probability === null ? state.below >= 1 : one.probability <= state.below));
  if (state.order === "unsure") shown.sort((a, b) => (a.probability ?? 2) - (b.probability ?? 2));
  const tools = h("div", { class: "bar tools" },
    h("label", {}, "Order ", h("select", { id: "order", on: { change: (event) => state.set({ order: event.target.value }) } },
      ORDERS.map(([value, title]) => h("option", { value, selected: value === state.order }, title)))),
    h("label", {}, "Probability at most ", h("select", { id: "below", on: { change: (event) => state.set({ below: Number(event.target.value) }) } },
      [1, 0.9, 0.5, 0.25, 0.1].map((value) => h("option", { value, selected: value === state.below }, percent(value))))),
    h("label", {}, "Origin ", h("select", { id: "origin", on: { change: (event) => state.set({ origin: event.target.value }) } },
      ["", ...Object.keys(ORIGINS)].map((value) => h("option", { value, selected: value === state.origin }, value || "all")))),
    h("label", {}, h("input", { type: "checkbox", id: "only-chosen", checked: state.onlyChosen, on: { change: (event) => state.set({ onlyChosen: event.target.checked }) } }), " the chosen call alone"),
    h("span", { class: "grow" }),
    h("small", {}, `${number(shown.length)} of ${number(all.length)} tokens`));
  if (!all.length) {
    show(view, tools, note("No call here tells its tokens. Ask for them: gen(\"answer\", return_logprob=True, top_logprobs_num=3, return_text_in_logprobs=True)."));
    return;
  }
  const rows = shown.slice(0, MOST_ROWS).map((one) =>
    h("tr", { class: one.call === state.chosen ? "chosen" : "", data: { call: one.call.id }, on: { click: () => state.choose(one.call) } },
      h("td", {}, one.call.label, h("small", {}, one.call.branch.length ? ` ${one.call.branch.join(".")}` : "")),
      h("td", { class: "number" }, one.at),
      h("td", {}, h("code", { class: `token ${look(one)}` }, visible(one.text))),
      h("td", { class: "number" }, one.probability === null ? "–" : [
        h("span", { class: "meter" }, h("i", { style: { width: `${one.probability * 100}%` } })), percent(one.probability)]),
      h("td", { class: "dim", title: ORIGINS[one.origin] }, one.origin),
      h("td", { class: "others" }, one.others.filter((other) => other.id !== one.id).map((other) =>
        h("span", { class: "chip" }, h("code", {}, visible(other.text)), " ", percent(other.probability)))),
      h("td", { class: "number dim" }, one.id)));
  show(
    view,
    tools,
    shown.length > MOST_ROWS ? note(`The first ${number(MOST_ROWS)} are shown.`) : null,
    h("table", { class: "tokens-table" },
      h("thead", {}, h("tr", {}, ["call", "#", "token", "probability", "origin", "instead", "id"].map((title) => h("th", { class: ["#", "probability", "id"].includes(title) ? "number" : "" }, title)))),
      h("tbody", {}, rows)),
  );
}
