// Run files (sglang_dsl/views/run_file.py says what is in them) and a server's requests, as calls to show.

const VERSION = 1;
const SHOWN_TEXT = 200_000;

const list = (value) => (Array.isArray(value) ? value : []);
const object = (value) => (value !== null && typeof value === "object" && !Array.isArray(value) ? value : {});
const finite = (value) => (typeof value === "number" && Number.isFinite(value) ? value : 0);

/** What a message, or a part of one, says. */
function textOf(content) {
  if (typeof content === "string") return content;
  return list(content)
    .map((part) => (typeof part?.text === "string" ? part.text : `[${part?.type ?? "part"}]`))
    .join("");
}

/** One call of a backend. */
export class Call {
  constructor(file, fields) {
    this.file = file;
    this.number = fields.call;
    this.id = `${file.id}.${fields.call}`;
    this.run = fields.run ?? 0;
    this.program = String(fields.program ?? "");
    this.kind = String(fields.kind ?? "");
    this.name = fields.name ?? null;
    this.branch = list(fields.branch);
    this.step = fields.step ?? 0;
    this.index = fields.index ?? null;
    this.backend = fields.backend ?? null;
    this.source = fields.source ?? null;
    this.at = finite(fields.at);
    this.request = object(fields.request);
    this.state = "running";
    this.seconds = null;
    this.first = null;
    this.replayed = false;
    this.reply = {};
    this.error = null;
    this.haystack = null;
  }

  end(fields) {
    this.state = "done";
    this.seconds = finite(fields.seconds);
    this.first = fields.first_token_s ?? null;
    this.replayed = fields.replayed === true;
    this.reply = object(fields.reply);
    this.haystack = null;
  }

  fail(fields) {
    this.state = "failed";
    this.seconds = finite(fields.seconds);
    this.error = object(fields.error);
    this.haystack = null;
  }

  get label() {
    return this.name ?? `(${this.kind})`;
  }

  get meta() {
    return object(this.reply.meta);
  }

  get messages() {
    return list(this.request.messages).map((one) => ({
      role: String(one?.role ?? ""),
      text: textOf(one?.content).slice(0, SHOWN_TEXT),
      open: one?.open === true,
    }));
  }

  get texts() {
    if (Array.isArray(this.reply.texts)) return this.reply.texts.map(String);
    if (typeof this.reply.text === "string") return [this.reply.text];
    const best = this.scores.find((one) => one.best);
    return best ? [best.text] : [];
  }

  /** Of a select: each choice with its mean log-probability; the best mean is marked. */
  get scores() {
    const choices = list(this.request.choices);
    const scored = list(this.reply.scores).map((one, at) => {
      const logprobs = list(one?.logprobs).map(finite);
      const sum = logprobs.reduce((a, b) => a + b, 0);
      return { text: String(choices[at] ?? at), sum, mean: sum / Math.max(1, logprobs.length), tokens: logprobs.length };
    });
    const most = Math.max(...scored.map((one) => one.mean));
    return scored.map((one) => ({ ...one, best: one.mean === most }));
  }

  /** Of a generation with log-probabilities: its tokens. */
  get tokens() {
    const tops = list(this.meta.output_top_logprobs);
    const origins = list(this.meta.output_token_origins);
    return list(this.meta.output_token_logprobs).map((one, at) => {
      const [logprob, id, text] = list(one);
      return {
        call: this,
        at,
        id,
        text: typeof text === "string" ? text : `#${id}`,
        origin: String(origins[at] ?? ""), // sampled, forced or speculated, where the backend says
        probability: typeof logprob === "number" ? Math.exp(logprob) : null,
        others: list(tops[at]).map(([value, other, name]) => ({
          probability: Math.exp(finite(value)),
          id: other,
          text: typeof name === "string" ? name : `#${other}`,
        })),
      };
    });
  }

  count(name) {
    return finite(this.meta[name]);
  }

  /** What lasted how long, in order: [name, begin, end] in seconds from the call's begin. */
  get phases() {
    const total = this.seconds ?? Math.max(0, this.file.now - this.at);
    if (this.state === "running") return [["running", 0, total]];
    if (this.state === "failed") return [["failed", 0, total]];
    const whole = Math.min(total, this.count("e2e_latency"));
    if (!whole || this.replayed) return [[this.replayed ? "replayed" : "call", 0, total]];
    const lead = total - whole;
    const queue = Math.min(whole, Math.max(0, this.count("queue_time")));
    const first = Math.min(whole, Math.max(queue, this.count("first_token_latency")));
    // While its constraint was compiled it could not be let in.
    const grammar = object(this.meta.grammar);
    const compile = grammar.cached === false ? Math.min(queue, finite(grammar.compile_s)) : 0;
    return [
      ["client", 0, lead],
      ["compile", lead, lead + compile],
      ["queue", lead + compile, lead + queue],
      ["prefill", lead + queue, lead + first],
      ["decode", lead + first, total],
    ].filter(([, from, to]) => to > from);
  }

  /** The share of its tokens that were appended without a step of their own. */
  get jumped() {
    return Math.min(1, this.count("jumped_tokens") / Math.max(1, this.count("completion_tokens")));
  }

  /** What a search looks through. */
  matches(terms) {
    if (this.haystack === null) {
      const parts = [this.program, this.kind, this.label, this.source, this.backend, this.branch.join("."),
        this.error?.type, this.error?.message, ...this.messages.map((one) => one.text), ...this.texts];
      this.haystack = parts.filter(Boolean).join("\n").toLowerCase();
    }
    return terms.every((term) => this.haystack.includes(term));
  }
}

let files = 0;

/** A run file as it is read, or a server's requests. */
export class RunFile {
  constructor(name) {
    this.id = files++;
    this.name = name;
    this.clear();
  }

  clear() {
    this.calls = new Map();
    this.head = null;
    this.cache = null;
    this.error = null;
    this.now = 0;
    this.lines = 0;
    this.rest = "";
    this.decoder = new TextDecoder();
  }

  /** Take more bytes of the file; whether there was anything new in them. */
  take(bytes) {
    this.rest += this.decoder.decode(bytes, { stream: true });
    const lines = this.rest.split("\n");
    this.rest = lines.pop();
    for (const line of lines) {
      this.lines += 1;
      if (this.error !== null) break;
      try {
        this.line(object(JSON.parse(line)));
      } catch (error) {
        this.error = `${this.name}, line ${this.lines}: ${error.message}`;
      }
    }
    return lines.length > 0;
  }

  line(fields) {
    if (this.head === null) {
      if (fields.type !== "run") throw new Error("it is not a run file");
      if (fields.version !== VERSION) throw new Error(`its version is ${fields.version}; this page reads ${VERSION}`);
      this.head = fields;
      this.now = finite(fields.began);
      return;
    }
    const call = this.calls.get(fields.call);
    switch (fields.type) {
      case "begin":
        this.calls.set(fields.call, new Call(this, fields));
        this.now = Math.max(this.now, finite(fields.at));
        break;
      case "end":
        call?.end(fields);
        break;
      case "error":
        call?.fail(fields);
        break;
      case "cache":
        this.cache = object(fields.tree);
        break;
      default:
        throw new Error(`a line of type ${JSON.stringify(fields.type)?.slice(0, 40)} is not known`);
    }
    if (call?.seconds) this.now = Math.max(this.now, call.at + call.seconds);
  }

  /** A server's answer to /recent_requests, in place of what there was. */
  requests(answer) {
    this.calls = new Map();
    this.now = finite(answer.now);
    const clients = [...new Set(list(answer.requests).map((one) => one.client))];
    list(answer.requests).forEach((one) => {
      const call = new Call(this, {
        call: one.rid, run: clients.indexOf(one.client), program: one.client ? `client ${one.client}` : "client",
        kind: "request", name: one.rid, at: one.began,
      });
      const meta = {
        queue_time: one.queue_s, first_token_latency: one.first_token_s, e2e_latency: one.seconds,
        finish_reason: { type: one.finish }, prompt_tokens: one.prompt_tokens, cached_tokens: one.cached_tokens,
        completion_tokens: one.completion_tokens, jumped_tokens: one.jumped_tokens, decode_steps: one.decode_steps,
      };
      if (one.failed) call.fail({ seconds: one.seconds, error: { type: one.finish, message: "" } });
      else if (one.finish !== null) call.end({ seconds: one.seconds, reply: { meta } });
      this.calls.set(one.rid, call);
    });
  }
}

/** The runs of programs in some calls, in order: {key, program, index, calls}. */
export function runsOf(calls) {
  const runs = new Map();
  for (const call of calls) {
    const key = `${call.file.id}.${call.run}.${call.program}`;
    if (!runs.has(key)) runs.set(key, { key, run: call.run, program: call.program, index: call.index, file: call.file, calls: [] });
    runs.get(key).calls.push(call);
  }
  return [...runs.values()];
}

/** Tokens and seconds of some calls. */
export function totals(calls) {
  const sum = (name) => calls.reduce((all, call) => all + call.count(name), 0);
  const began = calls.reduce((least, call) => Math.min(least, call.at), Infinity);
  const ended = calls.reduce((most, call) => Math.max(most, call.at + (call.seconds ?? 0)), 0);
  return {
    calls: calls.length,
    failed: calls.filter((call) => call.state === "failed").length,
    seconds: calls.length ? ended - began : 0,
    prompt: sum("prompt_tokens"),
    cached: sum("cached_tokens"),
    generated: sum("completion_tokens"),
    jumped: sum("jumped_tokens"),
  };
}
