// The gateway's API: one call, one search, and every failure as a Problem with words for a person.

const ROOT = new URL("./", document.baseURI);
const TOKEN = "clip-deploy.token";
const STAGES = ["prepare", "embed", "search", "gateway", "network"];

export const PAGE_SIZE = 12;

let held = stored((storage) => storage.getItem(TOKEN));

/** The bearer token, kept until the tab closes; where the browser keeps nothing, until the page does. */
export const token = {
  get: () => held,
  set(value) {
    held = value;
    stored((storage) => storage.setItem(TOKEN, value));
  },
  remove() {
    held = null;
    stored((storage) => storage.removeItem(TOKEN));
  },
};

function stored(use) {
  try {
    return use(sessionStorage);
  } catch {
    return null; // the browser was told to keep nothing
  }
}

export class Problem extends Error {
  constructor({ status = 0, title, detail = "", remedy = "", request_id = "" }, retryAfter = null) {
    super(title);
    Object.assign(this, { status, title, detail, remedy, request: request_id, retryAfter });
  }

  static async of(response) {
    const said = await response.json().catch(() => null);
    const status = response.status;
    const title = sentence(said?.title) || `The server answered ${status}, without an explanation.`;
    const words = { title, detail: sentence(said?.detail), remedy: sentence(said?.remedy) };
    return new Problem({ ...said, ...words, status }, seconds(response.headers.get("Retry-After")));
  }
}

/** A server's half sentence as a whole one; what begins with a name, as cat.jpg, keeps its letters. */
function sentence(text) {
  const said = typeof text === "string" ? text.trim() : "";
  const first = /^[a-z]+[ ,:]/.test(said) ? said.charAt(0).toUpperCase() : said.charAt(0);
  return said && first + said.slice(1) + (/[.!?…:]$/.test(said) ? "" : ".");
}

/** Seconds to wait, from a Retry-After in seconds or as a date; null where there is none. */
function seconds(header) {
  if (!header) return null;
  const value = /^\d+$/.test(header) ? Number(header) : (Date.parse(header) - Date.now()) / 1000;
  return Number.isFinite(value) ? Math.min(Math.max(Math.ceil(value), 0), 600) : null;
}

export async function call(path, options = {}) {
  const headers = new Headers(options.headers);
  if (token.get()) headers.set("Authorization", `Bearer ${token.get()}`);
  let response;
  try {
    response = await fetch(new URL(path, ROOT), { ...options, headers });
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new Problem({
      title: "The gateway does not answer.",
      detail: navigator.onLine ? "" : "This device is offline.",
      remedy: "Check that it runs and that it can be reached from here, then try again.",
    });
  }
  if (!response.ok) throw await Problem.of(response);
  return response;
}

export const thumbnail = (id) => new URL(`api/v1/images/${encodeURIComponent(id)}`, ROOT);

/** The gateway's answer, with the time on the way as one more stage. */
export async function search(query, signal) {
  const limit = query.limit ?? PAGE_SIZE;
  let path = "api/v1/search/text";
  let options = {};
  if (query.kind === "words") {
    const body = JSON.stringify({ text: query.text, mode: query.mode, limit });
    options = { body, headers: { "Content-Type": "application/json" } };
  } else {
    const file = query.file ?? (await (await call(thumbnail(query.id), { signal })).blob());
    path = `api/v1/search/image?limit=${limit}`;
    options.body = new FormData();
    options.body.append("file", file, file.name || "picture.jpg");
  }
  const began = performance.now();
  const answer = await (await call(path, { ...options, method: "POST", signal })).json();
  const took = performance.now() - began;
  return { ...answer, took, stages: stages(answer.timings_ms ?? {}, took) };
}

/** Milliseconds by stage. The gateway is what its total has beyond its stages; the network is what we saw beyond its total. */
function stages({ total = 0, ...known }, took) {
  const sum = STAGES.reduce((all, stage) => all + (known[stage] ?? 0), 0);
  const whole = { ...known, gateway: total - sum, network: took - Math.max(total, sum) };
  return STAGES.map((stage) => [stage, Math.max(whole[stage] ?? 0, 0)]).filter(([, ms]) => ms >= 0.05);
}
