// Elements made of data. Text is always set as text: nothing that a file or a server tells becomes markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "on") for (const [event, act] of Object.entries(value)) element.addEventListener(event, act);
    else if (name === "style") for (const [key, one] of Object.entries(value)) element.style.setProperty(key, one);
    else if (name === "data") Object.assign(element.dataset, value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(Infinity).filter((one) => one !== null && one !== undefined && one !== false));
  return element;
}

/** An HTML element: h("td", {class: "number"}, "12"). Strings among the children are text. */
export const h = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);

/** The same for SVG. */
export const s = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS(SVG, tag), attributes, children);

export const byId = (id) => document.getElementById(id);

/** White space made visible, for single tokens. */
export const visible = (text) =>
  text.replace(/ /g, "·").replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/\r/g, "␍");

/** One line of a text, cut. */
export function oneLine(text, most = 120) {
  const line = text.slice(0, most * 2).replace(/\s+/g, " ").trim();
  return line.length > most ? line.slice(0, most - 1) + "…" : line;
}

/** Seconds as people say them. */
export function seconds(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value < 0.001) return `${Math.round(value * 1e6)} µs`;
  if (value < 1) return `${(value * 1000).toFixed(value < 0.01 ? 2 : value < 0.1 ? 1 : 0)} ms`;
  if (value < 120) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
}

export const number = (value) => (value ?? 0).toLocaleString("en");

export const percent = (share) =>
  share > 0 && share < 0.001 ? "<0.1 %" : `${(share * 100).toFixed(share < 0.1 ? 1 : 0)} %`;

/** Fill a part of the page anew; what is null is left out. */
export const show = (element, ...children) => fill(element, {}, (element.replaceChildren(), children));

/** "1 call", "2 calls". */
export const count = (value, noun) => `${number(value)} ${noun}${value === 1 ? "" : "s"}`;

export function note(text) {
  return h("p", { class: "note" }, text);
}
