// The page: what is shown of which source, and what was chosen. viewer/sources.json lists the sources.

import { byId, h, number } from "./dom.js";
import { RunFile, runsOf } from "./runs.js";
import { showCompare } from "./compare.js";
import { showRadix } from "./radix.js";
import { showTimeline } from "./timeline.js";
import { showTokens } from "./tokens.js";
import { showDetail, showTree } from "./tree.js";

const POLL_MS = 1000;
const MOST_UNITS = 300;
const TABS = { tree: "Program tree", timeline: "Timeline", tokens: "Tokens", cache: "Prefix cache", compare: "Compare" };
const WITH_DETAIL = new Set(["tree", "timeline", "tokens", "compare"]);

const page = {
  tab: "tree", sources: { title: "", runs: [] }, files: [], chosen: null, notice: "", loading: true,
  unit: "", kind: "", state: "", search: "",
  zoom: 1, scroll: 0, order: "order", below: 1, origin: "", onlyChosen: false, a: null, b: null, onlyDifferent: false,
  opened: new Map(), closed: new Set(), prefix: null, tree: null, treeNote: "No prefix cache was recorded.",
};

// -- what is shown --------------------------------------------------------------------------------------------

/** Files, and the runs of those that have several: what can be looked at alone, or compared. */
function units() {
  const entries = [];
  for (const file of page.files) {
    const calls = [...file.calls.values()];
    entries.push({ key: `f${file.id}`, title: file.name, calls, single: false });
    const runs = runsOf(calls);
    if (runs.length < 2) continue;
    for (const [at, run] of runs.entries()) {
      if (entries.length >= MOST_UNITS) break;
      const item = run.index === null ? `run ${at + 1}` : `item ${run.index}`;
      entries.push({ key: `f${file.id}r${run.key}`, title: `${file.name} › ${run.program} ${item}`, calls: run.calls, single: true });
    }
  }
  return entries;
}

const terms = () => page.search.toLowerCase().split(/\s+/).filter(Boolean);

const matches = (call) =>
  (!page.kind || call.kind === page.kind) &&
  (!page.state || (page.state === "replayed" ? call.replayed : call.state === page.state)) &&
  call.matches(terms());

let all = [];

function emptyNote() {
  if (page.loading) return "Reading…";
  if (page.search || page.kind || page.state) return "No call matches.";
  if (page.sources.requests) return "No request has come yet.";
  return page.sources.runs.some((one) => one.live) ? "Waiting for the first call…" : "There are no calls. Open a run file.";
}

function render() {
  const every = units();
  const unit = every.find((one) => one.key === page.unit);
  all = unit ? unit.calls : page.files.flatMap((file) => [...file.calls.values()]);
  const calls = all.filter(matches);
  options(byId("unit"), [["", "all"], ...every.filter((one) => every.length > 1).map((one) => [one.key, one.title])], page.unit);
  options(byId("kind"), [["", "all"], ...[...new Set(all.map((call) => call.kind))].map((one) => [one, one])], page.kind);
  options(byId("state"), [["", "all"], ["done", "done"], ["failed", "failed"], ["running", "running"], ["replayed", "replayed"]], page.state);
  byId("count").textContent = `${number(calls.length)} of ${number(all.length)} calls`;
  for (const tab of byId("tabs").children) tab.setAttribute("aria-selected", String(tab.dataset.tab === page.tab));
  const errors = [page.notice, ...page.files.map((file) => file.error)].filter(Boolean);
  byId("notice").hidden = !errors.length;
  byId("notice").textContent = errors.join("; ");
  byId("key-form").hidden = !page.sources.wants_key;
  document.body.classList.toggle("with-detail", WITH_DETAIL.has(page.tab));
  draw(calls, every);
  byId("detail").hidden = !WITH_DETAIL.has(page.tab);
  if (WITH_DETAIL.has(page.tab)) showDetail(byId("detail"), page.chosen);
}

function draw(calls, every) {
  const view = byId("view");
  const top = view.scrollTop;
  const set = (values) => {
    Object.assign(page, values);
    render();
  };
  const common = { calls, chosen: page.chosen, choose, empty: emptyNote(), set };
  switch (page.tab) {
    case "tree":
      showTree(view, { ...common, isOpen: (key, open) => page.opened.get(key) ?? open, setOpen: (key, open) => page.opened.set(key, open) });
      break;
    case "timeline": {
      const state = {
        ...common, zoom: page.zoom, setZoom: (zoom) => set({ zoom: Math.min(256, Math.max(1, zoom)) }),
        get scroll() { return page.scroll; }, set scroll(value) { page.scroll = value; },
      };
      showTimeline(view, state);
      break;
    }
    case "tokens":
      showTokens(view, { ...common, order: page.order, below: page.below, origin: page.origin, onlyChosen: page.onlyChosen });
      break;
    case "cache":
      showRadix(view, { tree: shownTree(), treeNote: page.treeNote, terms: terms(), prefix: page.prefix, closed: page.closed,
        choosePrefix: (prefix) => set({ prefix }),
        fold: (id) => { page.closed.has(id) ? page.closed.delete(id) : page.closed.add(id); render(); } });
      break;
    case "compare":
      showCompare(view, { ...common, units: every, a: page.a, b: page.b, onlyDifferent: page.onlyDifferent, matches });
      break;
  }
  view.scrollTop = top;
}

/** The server's, or what the run file that is looked at has recorded at its end. */
function shownTree() {
  if (page.tree) return page.tree;
  const file = page.files.find((one) => page.unit.startsWith(`f${one.id}`) && one.cache) ?? page.files.find((one) => one.cache);
  return file?.cache ?? null;
}

function options(select, pairs, value) {
  const newPairs = JSON.stringify(pairs);
  if (select.dataset.pairs !== newPairs) {
    select.dataset.pairs = newPairs;
    select.replaceChildren(...pairs.map(([key, title]) => h("option", { value: key }, title)));
  }
  select.value = value;
}

function choose(call) {
  page.chosen = call;
  render();
  document.querySelector(`[data-call="${CSS.escape(call.id)}"]`)?.scrollIntoView({ block: "nearest" });
}

function show(tab) {
  page.tab = tab;
  history.replaceState(null, "", `#${tab}`);
  byId("view").scrollTop = 0;
  render();
}

let isQueued = false;

/** Render soon: several changes at once are drawn once. */
function renderSoon() {
  if (isQueued) return;
  isQueued = true;
  requestAnimationFrame(() => {
    isQueued = false;
    render();
  });
}

// -- sources --------------------------------------------------------------------------------------------------

const key = () => byId("key").value.trim();

async function ask(url) {
  const headers = key() ? { Authorization: `Bearer ${key()}` } : {};
  const answer = await fetch(url, { headers, cache: "no-store" });
  if (!answer.ok) {
    const body = await answer.json().catch(() => ({}));
    throw new Error(body.error?.message ?? `${url.split("?")[0]}: the server answered ${answer.status}`);
  }
  return answer;
}

/** Read on in a run file until there is no more; whether anything new came. */
async function readOn(file) {
  let changed = false;
  for (;;) {
    const answer = await ask(`${file.source.url}?from=${file.offset}`);
    if (Number(answer.headers.get("x-size") ?? file.offset) < file.offset) {
      file.clear(); // it was written anew
      file.offset = 0;
      page.chosen = null;
      continue;
    }
    const bytes = new Uint8Array(await answer.arrayBuffer());
    if (!bytes.length) return changed;
    file.offset += bytes.length;
    changed = file.take(bytes) || changed;
  }
}

async function look() {
  let changed = false;
  let notice = "";
  const live = page.sources.runs.some((one) => one.live) || page.sources.requests;
  try {
    for (const file of page.files.filter((one) => one.source && (one.source.live || page.loading))) {
      changed = (await readOn(file)) || changed;
      if ([...file.calls.values()].some((call) => call.state === "running")) {
        file.now = Math.max(file.now, Date.now() / 1000);
        changed = changed || live;
      }
    }
    if (page.sources.requests) {
      const requests = await (await ask(page.sources.requests)).text();
      const tree = page.tab === "cache" || page.loading ? await (await ask(page.sources.radix)).text() : page.treeText;
      changed = changed || requests !== page.requestsText || tree !== page.treeText;
      if (requests !== page.requestsText) server().requests(JSON.parse(requests));
      page.chosen = page.chosen ? (page.chosen.file.calls.get(page.chosen.number) ?? page.chosen) : null;
      Object.assign(page, { requestsText: requests, treeText: tree, tree: tree ? JSON.parse(tree) : null });
    }
  } catch (error) {
    notice = error.message;
    page.treeNote = error.message;
  }
  if (page.loading || notice !== page.notice) changed = true;
  Object.assign(page, { loading: false, notice });
  byId("live").hidden = !live || Boolean(notice);
  if (changed) renderSoon();
  if (live) setTimeout(look, document.hidden ? POLL_MS * 5 : POLL_MS);
}

function server() {
  let requests = page.files.find((file) => file.isServer);
  if (!requests) {
    requests = new RunFile("requests of this server");
    requests.isServer = true;
    page.files.unshift(requests);
  }
  return requests;
}

async function openFiles(list) {
  for (const one of list) {
    const file = new RunFile(one.name);
    const reader = one.stream().getReader();
    for (let part = await reader.read(); !part.done; part = await reader.read()) file.take(part.value);
    page.files.push(file);
    page.unit = `f${file.id}`;
  }
  page.loading = false;
  render();
}

// -- controls -------------------------------------------------------------------------------------------------

function theme(step) {
  const stored = () => {
    try {
      return localStorage.getItem("theme");
    } catch {
      return null; // storage is switched off
    }
  };
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = stored() ?? (dark ? "dark" : "light");
  const next = step ? (now === "dark" ? "light" : "dark") : now;
  if (step) {
    try {
      localStorage.setItem("theme", next);
    } catch {
      // it lasts as long as the page
    }
  }
  document.documentElement.dataset.theme = next;
}

function move(step) {
  const shown = [...document.querySelectorAll("#view [data-call]")].map((one) => one.dataset.call);
  const at = shown.indexOf(page.chosen?.id);
  const next = all.find((call) => call.id === shown[Math.max(0, Math.min(shown.length - 1, at + step))]);
  if (next) choose(next);
}

function controls() {
  byId("tabs").append(...Object.entries(TABS).map(([tab, title]) =>
    h("button", { type: "button", role: "tab", data: { tab }, on: { click: () => show(tab) } }, title)));
  for (const name of ["unit", "kind", "state"]) {
    byId(name).addEventListener("change", (event) => {
      page[name] = event.target.value;
      render();
    });
  }
  byId("search").addEventListener("input", (event) => {
    page.search = event.target.value;
    renderSoon();
  });
  byId("open").addEventListener("click", () => byId("file").click());
  byId("file").addEventListener("change", (event) => openFiles([...event.target.files]));
  byId("theme").addEventListener("click", () => theme(true));
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    page.loading = true;
  });
  addEventListener("dragover", (event) => event.preventDefault());
  addEventListener("drop", (event) => {
    event.preventDefault();
    openFiles([...event.dataTransfer.files]);
  });
  addEventListener("resize", renderSoon);
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || /INPUT|SELECT|TEXTAREA/.test(event.target.tagName)) return;
    if (event.key === "/") {
      event.preventDefault();
      byId("search").focus();
    } else if (event.key === "j" || event.key === "k") {
      move(event.key === "j" ? 1 : -1);
    } else if (Object.keys(TABS)[event.key - 1]) {
      show(Object.keys(TABS)[event.key - 1]);
    }
  });
}

async function begin() {
  theme(false);
  controls();
  if (Object.hasOwn(TABS, location.hash.slice(1))) page.tab = location.hash.slice(1);
  try {
    page.sources = await (await ask("viewer/sources.json")).json();
  } catch (error) {
    page.notice = error.message;
  }
  byId("title").textContent = page.sources.title || "viewer";
  document.title = `${page.sources.title} – viewer`;
  page.files = page.sources.runs.map((source) => Object.assign(new RunFile(source.name), { source, offset: 0 }));
  if (page.sources.requests && !location.hash) page.tab = "timeline";
  render();
  await look();
}

begin();
