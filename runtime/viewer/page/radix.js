// The prefix cache: a radix tree of token runs. Above as a map (width: tokens below), then as a list.

import { h, note, number, oneLine, s, show, visible } from "./dom.js";

const MOST_LINES = 1000;
const DEPTH = 10;
const ROW = 20;

/** The nodes of a tree as parents and children, with the tokens that are in and below each. */
export function prefixes(tree) {
  const nodes = (Array.isArray(tree?.nodes) ? tree.nodes : []).map((one) => ({ ...one, below: [], above: null }));
  const byId = new Map(nodes.map((one) => [one.id, one]));
  const roots = [];
  for (const one of nodes) {
    one.above = byId.get(one.parent) ?? null;
    (one.above?.below ?? roots).push(one);
  }
  // Parents come first, so from the end on all children are summed already.
  for (const one of [...nodes].reverse()) {
    one.weight = one.tokens + one.below.reduce((sum, child) => sum + child.weight, 0);
    one.below.sort((a, b) => b.hits - a.hits || b.weight - a.weight);
  }
  roots.sort((a, b) => b.hits - a.hits || b.weight - a.weight);
  return { nodes, roots };
}

/** 0 (never reused) to 5. */
const heat = (hits, most) => (hits ? 1 + Math.min(4, Math.floor((4 * Math.log1p(hits)) / Math.log1p(most || 1))) : 0);

const label = (node) =>
  typeof node.text === "string" ? `${visible(node.text)}${node.cut ? "…" : ""}` : `${number(node.tokens)} tokens`;

function map(roots, width, most, state) {
  // A node is as wide as the leaves below it need; long prompts do not push short ones out of sight.
  const size = (node) => (node.size ??= Math.max(1, node.below.reduce((sum, child) => sum + size(child), 0)));
  const total = roots.reduce((sum, node) => sum + size(node), 0) || 1;
  const parts = [];
  let deepest = 0;
  const draw = (node, x, depth) => {
    const wide = (size(node) / total) * width;
    if (depth >= DEPTH || wide < 1.5) return;
    deepest = Math.max(deepest, depth);
    parts.push(s("g", { class: `prefix${state.prefix === node.id ? " chosen" : ""}`, on: { click: () => state.choosePrefix(node.id) } },
      s("rect", { class: `heat${heat(node.hits, most)}`, x, y: depth * ROW, width: Math.max(0.5, wide - 1), height: ROW - 1, rx: 2 }),
      wide > 30 ? s("text", { x: x + 4, y: depth * ROW + 14 }, oneLine(label(node), Math.floor(wide / 7.5))) : null,
      s("title", {}, `${label(node)}\n${number(node.tokens)} tokens, ${number(node.hits)} hits, ${number(node.locks)} reading now`)));
    let at = x;
    for (const child of node.below) {
      draw(child, at, depth + 1);
      at += (size(child) / total) * width;
    }
  };
  let at = 0;
  for (const root of roots) {
    draw(root, at, 0);
    at += (size(root) / total) * width;
  }
  return s("svg", { class: "map", width, height: (deepest + 1) * ROW, role: "img", "aria-label": "map of the prefix cache" }, parts);
}

function lines(roots, most, state, keep) {
  const rows = [];
  const walk = (node, depth) => {
    if (rows.length >= MOST_LINES || (keep && !keep.has(node))) return;
    const hidden = node.children - node.below.length;
    const closed = state.closed.has(node.id);
    rows.push(h("tr", { class: state.prefix === node.id ? "chosen" : "", data: { prefix: node.id }, on: { click: () => state.choosePrefix(node.id) } },
      h("td", { class: "prefix-text" },
        h("span", { style: { "padding-left": `${Math.min(depth, 24) * 14}px` } }),
        node.below.length
          ? h("button", { type: "button", class: "fold", "aria-expanded": String(!closed), on: { click: (event) => { event.stopPropagation(); state.fold(node.id); } } }, closed ? "▸" : "▾")
          : h("span", { class: "fold" }, "·"),
        h("code", {}, label(node)),
        hidden > 0 ? h("small", {}, ` ${number(hidden)} more below`) : ""),
      h("td", { class: "number" }, h("span", { class: `dot heat${heat(node.hits, most)}` }), number(node.hits)),
      h("td", { class: "number" }, number(node.tokens)),
      h("td", { class: "number dim" }, number(node.start)),
      h("td", { class: "number" }, node.locks ? h("span", { class: "chip good" }, number(node.locks)) : ""),
      h("td", { class: "number dim" }, number(node.idle)),
      h("td", { class: "number dim" }, node.namespace || "")));
    if (!closed || keep) node.below.forEach((child) => walk(child, depth + 1));
  };
  roots.forEach((root) => walk(root, 0));
  return rows;
}

/** The nodes whose text matches, with those above them; null: all. */
function matching(nodes, terms) {
  if (!terms.length) return null;
  const keep = new Set();
  for (const node of nodes) {
    const text = String(node.text ?? "").toLowerCase();
    if (!terms.every((term) => text.includes(term))) continue;
    for (let at = node; at && !keep.has(at); at = at.above) keep.add(at);
  }
  return keep;
}

export function showRadix(view, state) {
  const tree = state.tree;
  if (!tree) {
    show(view, note(state.treeNote));
    return;
  }
  const { nodes, roots } = prefixes(tree);
  if (!nodes.length) {
    show(view, note("The prefix cache is empty."));
    return;
  }
  const most = nodes.reduce((least, one) => Math.max(least, one.hits), 0);
  const keep = matching(nodes, state.terms);
  const held = nodes.reduce((sum, one) => sum + one.tokens, 0);
  const rows = lines(roots, most, state, keep);
  show(
    view,
    h("div", { class: "bar tools" },
      h("div", { class: "counts" }, [["nodes", nodes.length + (tree.left_out ?? 0)], ["tokens held", (tree.evictable ?? 0) + (tree.protected ?? 0)],
        ["in use now", tree.protected ?? 0], ["most hits", most]].map(([title, value]) => h("div", {}, h("b", {}, number(value)), h("small", {}, title)))),
      h("span", { class: "grow" }),
      h("div", { class: "legend" }, h("span", {}, "hits"), [0, 1, 2, 3, 4, 5].map((step) => h("i", { class: `heat${step}` })))),
    tree.left_out ? note(`The ${number(nodes.length)} most used nodes, ${number(held)} tokens; at least ${number(tree.left_out)} more are not listed.`) : null,
    tree.texts === false ? note("Texts are shown to the admin key alone.") : null,
    map(roots, Math.max(320, view.clientWidth - 34), most, state),
    h("table", { class: "radix" },
      h("thead", {}, h("tr", {}, [["prefix", "its tokens, as text"], ["hits", "sequences that reused it"], ["tokens", "that it holds"],
        ["from", "tokens before it"], ["locks", "sequences that read it now"], ["idle", "uses of the cache since"], ["space", "namespace: of different ones nothing is shared"]]
        .map(([title, what], at) => h("th", { title: what, class: at ? "number" : "" }, title)))),
      h("tbody", {}, rows)),
    rows.length >= MOST_LINES ? note(`The first ${number(MOST_LINES)} lines; search for others.`) : null,
  );
}
