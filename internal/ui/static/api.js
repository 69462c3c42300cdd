// Requests to the server that the page came from, with the user's own rights. The token is in this module's memory and
// nowhere else: closing the page, or loading it again, forgets it.

let token = '';

export function setToken(t) { token = t; }

// Failure is an answer that is not 2xx.
export class Failure extends Error {
  constructor(code, message) { super(message); this.code = code; }
}

const patience = 60e3; // ms for an answer
const watchFor = [240, 300]; // s after which the server ends a watch
const watchPatience = 330e3; // ms; a watch that has not ended then hangs

// within aborts with signal, which may be missing, and after a time.
const within = (ms, signal) => (signal ? AbortSignal.any([signal, AbortSignal.timeout(ms)]) : AbortSignal.timeout(ms));

// reason is an error in words: browsers differ in theirs for one that timed out.
const reason = (e) => (e.name === 'TimeoutError' ? 'no answer in time' : e.message);

async function request(path, signal) {
  const headers = { Accept: 'application/json' };
  if (token) headers.Authorization = 'Bearer ' + token;
  const answer = await fetch(path, { headers, signal, cache: 'no-store', redirect: 'error' });
  if (answer.ok) return answer;
  const text = (await answer.text()).slice(0, 2000);
  let message = text;
  try { message = JSON.parse(text).message || text; } catch { /* not a Status */ }
  throw new Failure(answer.status, message || answer.statusText);
}

const pause = (ms) => new Promise((done) => setTimeout(done, ms));

// ask gets JSON, and its text, until signal aborts. A server that is busy with this user's questions is asked again.
export async function ask(path, params = [], signal = undefined) {
  const query = new URLSearchParams(params).toString();
  const until = within(patience, signal);
  for (let tries = 0; ; tries++) {
    try {
      const text = await (await request(query ? path + '?' + query : path, until)).text();
      return { value: JSON.parse(text), text };
    } catch (e) {
      if (e.name === 'TimeoutError') throw new Error(reason(e));
      if (e.code !== 429 || tries === 10) throw e;
      await pause(500 + 1000 * Math.random());
    }
  }
}

const pageSize = 2000;
const firstPage = 200; // what is shown while the rest is on its way
const settled = 5e3; // ms; a watch that ends earlier is not begun again at once

const wholePatience = 15e3; // ms

// whole gets a list as the server cuts it down to what the page shows, null if it does not: of another version, or for other users.
async function whole(kind, namespace, signal) {
  try {
    const { value } = await ask('/fairlead/objects', [['kind', kind], ...(namespace ? [['namespace', namespace]] : [])],
      within(wholePatience, signal));
    for (const o of value.items) {
      o.metadata.written = (o.metadata.writes || []).map(([at, n]) => ({ at: 1000 * at, ...value.writes[n] }));
    }
    return value;
  } catch (e) {
    if (e.code === 401) throw e;
    return null;
  }
}

// follow lists a kind and watches it until signal aborts. on has reset(items), one(type, object) and state(text), where the
// text is empty while the watch runs. read, if on has it, makes an item of an object: no more than a page of objects is kept.
// some(items), if on has it, gets the first of many items: to show them costs less than to show each page. Of many items, if on has
// short(), which are the parameters of whole, the others are read with that if the server has it. A refusal (403) ends it.
export async function follow(path, on, signal) {
  let version = '';
  let wait = 0;
  const rest = () => {
    wait = Math.min(30000, wait * 2 || 500);
    return pause(wait * (0.5 + Math.random()));
  };
  while (!signal.aborted) {
    const began = Date.now();
    try {
      if (!version) {
        const items = [];
        let more = '';
        let at = '';
        do {
          const page = await (await request(`${path}?limit=${items.length ? pageSize : firstPage}&continue=${encodeURIComponent(more)}`,
            within(patience, signal))).json();
          for (const o of page.items) items.push(on.read ? on.read(o) : o);
          more = page.metadata.continue || '';
          at = page.metadata.resourceVersion;
          if (!more || items.length > firstPage) continue;
          if (on.some) on.some(items);
          const all = on.short && await whole(...on.short, signal);
          if (all) {
            items.length = more = 0;
            for (const o of all.items) items.push(on.read(o));
            at = all.resourceVersion;
          }
        } while (more);
        on.reset(items);
        version = at; // only now: a list that was cut off is begun again
      }
      on.state('');
      version = await watch(path, version, on, signal);
      if (Date.now() - began < settled) await rest();
      else wait = 0;
    } catch (e) {
      if (signal.aborted) return;
      if (e.code === 403 || e.code === 401) { on.state(e.message, e.code); return; }
      if (e.code !== 410) on.state('the server does not answer: ' + reason(e));
      else {
        version = ''; // the server has forgotten it: list again
        if (Date.now() - began >= settled) wait = 0;
      }
      await rest();
    }
  }
}

// watch reads one watch to its end, and returns the version to go on from.
async function watch(path, version, on, signal) {
  const query = `watch=1&allowWatchBookmarks=true&timeoutSeconds=${watchFor[0] + Math.floor((watchFor[1] - watchFor[0]) * Math.random())}`;
  const answer = await request(`${path}?${query}&resourceVersion=${version}`, within(watchPatience, signal));
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return version;
    const lines = (rest + value).split('\n');
    rest = lines.pop();
    for (const line of lines) {
      if (!line) continue;
      const { type, object } = JSON.parse(line);
      if (type === 'ERROR') throw new Failure(object.code, object.message);
      version = object.metadata.resourceVersion;
      if (type !== 'BOOKMARK') on.one(type, object);
    }
  }
}
