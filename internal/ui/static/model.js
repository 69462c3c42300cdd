// What the page knows, and a row for each Service with the judgement of it. A change costs work for the Services that it is
// about, not for all of them. Views subscribe and are told a few times a second at most.

export const state = {
  namespace: '', // the only one that is shown, or empty for all
  services: new Map(), // by NAMESPACE/NAME
  slices: new Map(), // by the key of the Service, then by the name of the slice
  nodes: new Map(),
  nodesHidden: false, // the user may not read them
  nodesVersion: 0, // grows with each change of nodes and with each report
  findings: new Map(), // the Services that do not answer, by their key
  explained: new Map(), // the finding of an explanation, for a while or until the Service changes
  concerns: new Map(), // lines of the report about a Service, by its key
  others: [], // lines of the report that are not about a Service that is shown
  report: null, // as 'fairlead status -o json' has it, without the list of Services
  certificates: null,
  balancers: null, // the load balancers and routes, as /fairlead/balancers has them
  balancersTrouble: '', // why they are not known
  changes: [], // the newest first
  judged: false, // the findings of all Services are there
  trouble: new Map(), // what could not be read, by kind
};

// isService tells NAMESPACE/NAME from the other questions, a name and an address with a port.
export const isService = (question) => question.includes('/');

const listeners = new Set();
let frame = 0;

export function subscribe(f) {
  listeners.add(f);
  return () => listeners.delete(f);
}

const together = 60; // ms for which changes are gathered

export function changed() {
  frame ||= setTimeout(() => requestAnimationFrame(() => { frame = 0; for (const f of listeners) f(); }), together);
}

// endpointsOf are the endpoints of a Service in the family that has more of them, as a dual-stack Pod is an endpoint of each.
export function endpointsOf(key) {
  const by = new Map();
  for (const s of (state.slices.get(key) || new Map()).values()) by.set(s.family, (by.get(s.family) || []).concat(s.endpoints));
  return [...by.values()].sort((a, b) => b.length - a.length)[0] || [];
}

const nodeOf = new Map(); // the name of the node with an address, as of nodesNamed
let nodesNamed = -1;

// nameOf is an address with the name of the Pod or the node that has it, as far as the page knows them.
export function nameOf(address) {
  if (nodesNamed !== state.nodesVersion) {
    nodesNamed = state.nodesVersion;
    nodeOf.clear();
    for (const n of state.nodes.values()) for (const a of n.addresses) nodeOf.set(a, 'node ' + n.name);
  }
  const name = nodeOf.get(address) || (podOf.get(address) || {}).name; // a Pod with its node's address is not told from others there
  return name ? `${name} (${address})` : address;
}

// Severity of what is shown of a Service, the worst last.
const levels = ['good', 'none', 'wait', 'warn', 'bad'];
const warn = levels.indexOf('warn');

const sent = 'sent, not probed'; // the answer for UDP and SCTP

// levelOf is the severity of an answer of 'fairlead explain'.
export const levelOf = (answer) => ({ answers: 'good', [sent]: 'good', sometimes: 'warn', 'not a Service': 'none' }[answer] || 'bad');

// judge returns the state of a Service: its level, the answer and cause in the words of 'fairlead explain', and why.
function judge(s, lines) {
  const found = state.explained.get(s.key) || state.findings.get(s.key);
  if (found && found.answer !== 'answers') {
    return { level: levelOf(found.answer), answer: found.answer, cause: found.cause || '', why: found.text || '', source: found.source,
      remedy: found.remedy };
  }
  if (s.type === 'ExternalName') return { level: 'none', answer: 'alias', cause: '', why: 'its name is an alias of ' + s.alias };
  if (!state.judged) return { level: 'wait', answer: 'not judged yet', cause: '', why: '' };
  if (lines.length) return { level: 'warn', answer: 'look at this', cause: '', why: lines[0] };
  return { level: 'good', answer: s.ports.some((p) => p.protocol !== 'TCP') ? sent : 'answers', cause: '', why: '' };
}

function rowOf(s) {
  const lines = state.concerns.get(s.key) || [];
  const j = judge(s, lines);
  const list = endpointsOf(s.key);
  return { key: s.key, s, j, lines, rank: levels.indexOf(j.level), total: list.length, ready: list.filter((e) => e.ready).length, text: '' };
}

// textOf is what a search of a row looks at, also the endpoints of the other family.
function textOf(row) {
  const { s, j } = row;
  const slices = [...(state.slices.get(s.key) || new Map()).values()];
  row.text ||= [s.key, s.type, s.selector, j.answer, j.cause, ...s.ips, ...s.balancers, ...s.external,
    ...s.ports.flatMap((p) => [p.port, p.node || '']), ...slices.flatMap((l) => l.endpoints.flatMap((e) => [e.pod, e.address, e.node]))]
    .join(' ').toLowerCase();
  return row.text;
}

const order = (a, b) => b.rank - a.rank || (a.key < b.key ? -1 : a.key > b.key ? 1 : 0);

// Rows are the rows for which has is true, the worst first, then by key. A row is replaced, never changed.
class Rows {
  constructor(has) { this.has = has; this.list = []; }

  fill() { this.list = [...rows.values()].filter(this.has).sort(order); }

  place(row) {
    let from = 0;
    for (let to = this.list.length; from < to;) {
      const middle = (from + to) >> 1;
      if (order(this.list[middle], row) < 0) from = middle + 1; else to = middle;
    }
    return from;
  }

  add(row) { if (this.has(row)) this.list.splice(this.place(row), 0, row); }

  remove(row) {
    const at = this.place(row);
    if (this.list[at] === row) this.list.splice(at, 1);
  }
}

const rows = new Map(); // by the key of the Service
export const all = new Rows(() => true);
export const wrong = new Rows((row) => !!row.j.cause); // the Services with a cause
export const concerned = new Rows((row) => !row.j.cause && row.lines.length > 0); // that only the report names
let found = all;

// numbers are of all rows; lines is how many the concerned ones have.
export const numbers = { kinds: {}, endpoints: 0, ready: 0, lines: 0 };

function count(row, by) {
  numbers.kinds[row.s.type] = (numbers.kinds[row.s.type] || 0) + by;
  numbers.endpoints += by * row.total;
  numbers.ready += by * row.ready;
  if (concerned.has(row)) numbers.lines += by * row.lines.length;
}

const lists = () => new Set([all, wrong, concerned, found]);

// rowFor returns the row of a Service, undefined if there is none.
export const rowFor = (key) => rows.get(key);

// refresh makes the row of a Service again.
export function refresh(key) {
  const before = rows.get(key);
  if (before) {
    rows.delete(key);
    count(before, -1);
    for (const l of lists()) l.remove(before);
  }
  const s = state.services.get(key);
  if (!s) return;
  const row = rowOf(s);
  rows.set(key, row);
  count(row, 1);
  for (const l of lists()) l.add(row);
}

export function refreshAll() {
  rows.clear();
  Object.assign(numbers, { kinds: {}, endpoints: 0, ready: 0, lines: 0 });
  for (const s of state.services.values()) {
    const row = rowOf(s);
    rows.set(s.key, row);
    count(row, 1);
  }
  for (const l of lists()) l.fill();
}

const many = 500; // rows; to sort them all is then cheaper

function refreshEach(keys) {
  if (keys.length > many) refreshAll(); else for (const k of keys) refresh(k);
}

// find returns the rows that match a search, and keeps them as they change, until the next search.
export function find(search, only) {
  const words = search.toLowerCase().split(/\s+/).filter(Boolean);
  found = all;
  if (words.length || only) {
    found = new Rows((row) => (!only || row.rank >= warn) && words.every((w) => textOf(row).includes(w)));
    found.fill();
  }
  return found;
}

// replace gives a Map the values of next for some keys, and makes the rows of those again whose value differs.
function replace(map, next, keys) {
  const differ = [];
  for (const k of keys) {
    if (JSON.stringify(map.get(k)) === JSON.stringify(next.get(k))) continue;
    differ.push(k);
    if (next.has(k)) map.set(k, next.get(k)); else map.delete(k);
  }
  refreshEach(differ);
}

// setFindings takes the findings of the named Services, or of all of them.
export function setFindings(list, names) {
  const next = new Map(list.map((f) => [f.service, f]));
  replace(state.findings, next, names || new Set([...state.findings.keys(), ...next.keys()]));
  if (!names && !state.judged) {
    state.judged = true;
    refreshAll();
  }
}

// setOthers keeps the lines of the report that stand below no Service.
function setOthers() {
  if (!state.report) return;
  const shown = new Set((state.report.serviceProblems || []).filter((p) => state.services.has(p.service)).map((p) => p.text));
  state.others = [...new Set(state.report.problems)].filter((l) => !shown.has(l));
}

export function setReport(report) {
  const next = new Map();
  for (const { service, text } of report.serviceProblems || []) next.set(service, [...(next.get(service) || []), text]);
  state.report = report;
  state.nodesVersion++;
  setOthers();
  replace(state.concerns, next, new Set([...state.concerns.keys(), ...next.keys()]));
}

const explainedFor = 120e3; // ms for which an explanation counts more than the server's judgement

export function setExplained(key, finding) {
  state.explained.set(key, finding);
  refresh(key);
  setTimeout(() => {
    if (state.explained.get(key) !== finding) return;
    state.explained.delete(key);
    refresh(key);
    changed();
  }, explainedFor);
}

export function setServices(list) {
  state.services = new Map(list.map((s) => [s.key, s]));
  setOthers();
  refreshAll();
}

// setService takes a Service, or if it is null takes away the one with the key.
export function setService(key, s) {
  state.explained.delete(key);
  const known = state.services.has(key);
  const named = state.concerns.has(key);
  if (s) {
    state.services.set(key, s);
  } else {
    state.services.delete(key);
    state.findings.delete(key); // its lines of the report stay until the next one, for a Service that returns
  }
  if (known !== !!s && named) setOthers();
  refresh(key);
}

const ownerOf = new Map(); // the key of the Service of each slice, by NAMESPACE/NAME of the slice

const podOf = new Map(); // the Pod with an address: its NAMESPACE/NAME, and the slice that has told

// forgetPods forgets what a slice has told.
function forgetPods(id, of, name) {
  for (const e of of && of.has(name) ? of.get(name).endpoints : []) if ((podOf.get(e.address) || {}).by === id) podOf.delete(e.address);
}

function place(s) {
  const before = ownerOf.get(s.id);
  forgetPods(s.id, state.slices.get(before), s.name);
  for (const e of s.endpoints) if (e.pod) podOf.set(e.address, { name: s.id.split('/')[0] + '/' + e.pod, by: s.id });
  if (before !== undefined && before !== s.service) displace(s.id, s.name);
  ownerOf.set(s.id, s.service);
  if (!state.slices.has(s.service)) state.slices.set(s.service, new Map());
  state.slices.get(s.service).set(s.name, s);
}

function displace(id, name) {
  const key = ownerOf.get(id);
  const of = state.slices.get(key);
  ownerOf.delete(id);
  if (!of) return;
  of.delete(name);
  if (!of.size) state.slices.delete(key);
}

export function setSlices(list) {
  state.slices = new Map();
  ownerOf.clear();
  podOf.clear();
  for (const s of list) place(s);
  refreshAll();
}

// setSlice takes a slice, or takes it away, and returns what it was and the Services that it is about: two if its label changed.
export function setSlice(s, gone) {
  const owner = ownerOf.get(s.id);
  const before = owner === undefined ? undefined : state.slices.get(owner).get(s.name);
  if (gone) {
    forgetPods(s.id, state.slices.get(owner), s.name);
    displace(s.id, s.name);
  } else place(s);
  const keys = [...new Set([owner ?? s.service, s.service])];
  for (const k of keys) {
    state.explained.delete(k);
    refresh(k);
  }
  return { before, keys };
}

// stampOf differs after each change of a Service or of its slices.
export function stampOf(key) {
  const s = state.services.get(key);
  const slices = [...(state.slices.get(key) || new Map()).values()].map((l) => l.name + ':' + l.version).sort();
  return [s ? s.version : '', ...slices].join();
}
