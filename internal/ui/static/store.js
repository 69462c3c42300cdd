// What the page knows: objects from watches, cut down to what is shown, and the server's judgement of them. Views subscribe
// and are told a few times a second at most.
import { ask, follow } from './api.js';

export const state = {
  namespace: '', // the only one that is shown, or empty for all
  services: new Map(), // by NAMESPACE/NAME
  slices: new Map(), // by the key of the Service, then by the name of the slice
  nodes: new Map(),
  nodesHidden: false, // the user may not read them
  findings: new Map(), // the Services that do not answer, by their key
  explained: new Map(), // the worst verdict of an explanation, for a while or until the Service changes
  problems: [], // lines of the report
  concerns: new Map(), // lines about a Service, by its key
  report: null, // as 'fairlead status -o json' has it
  certificates: null,
  changes: [], // the newest first
  judged: false, // the findings of all Services are there
  trouble: new Map(), // what could not be read, by kind
  version: 0, // grows with each change of what is here
};

const maxChanges = 1000;
export const hour = 3600e3;
const explainedFor = 120e3; // ms for which an explanation counts more than the server's judgement
const listeners = new Set();
let frame = 0;

export function subscribe(f) {
  listeners.add(f);
  return () => listeners.delete(f);
}

const together = 60; // ms for which changes are gathered

export function changed() {
  state.version++;
  frame ||= setTimeout(() => requestAnimationFrame(() => { frame = 0; for (const f of listeners) f(); }), together);
}

const keyOf = (o) => o.metadata.namespace + '/' + o.metadata.name;

// writes are who wrote which fields of an object, and when, within the last hour.
function writes(o) {
  const out = [];
  for (const f of o.metadata.managedFields || []) {
    const at = Date.parse(f.time);
    if (Date.now() - at < hour) {
      out.push({ at, who: f.manager, how: f.operation, part: f.subresource || '', fields: fieldNames(f.fieldsV1 || {}) });
    }
  }
  return out;
}

// fieldNames are the names two levels down, such as spec.ports.
function fieldNames(fields) {
  const out = [];
  for (const [top, below] of Object.entries(fields)) {
    for (const name of Object.keys(below)) {
      if (name.startsWith('f:')) out.push(top.slice(2) + '.' + name.slice(2));
    }
  }
  return out.sort((a, b) => b.startsWith('spec.') - a.startsWith('spec.')).slice(0, 6).join(', ');
}

function serviceOf(o) {
  const s = o.spec;
  return {
    key: keyOf(o), kind: 'Service', namespace: o.metadata.namespace, name: o.metadata.name, type: s.type, created: o.metadata.creationTimestamp,
    ips: (s.clusterIPs || []).filter(Boolean), external: s.externalIPs || [], alias: s.externalName || '',
    balancers: ((o.status.loadBalancer || {}).ingress || []).map((i) => i.ip || i.hostname),
    ports: (s.ports || []).map((p) => ({ port: p.port, protocol: p.protocol, node: p.nodePort || 0, target: String(p.targetPort ?? p.port) })),
    selector: Object.entries(s.selector || {}).map(([k, v]) => k + '=' + v).sort().join(','),
    policy: [s.internalTrafficPolicy, s.externalTrafficPolicy].includes('Local') ? 'Local' : '',
    writes: writes(o), text: JSON.stringify(s),
  };
}

function sliceOf(o) {
  return {
    name: o.metadata.name, service: o.metadata.namespace + '/' + (o.metadata.labels || {})['kubernetes.io/service-name'],
    family: o.addressType, ports: (o.ports || []).map((p) => p.port), writes: writes(o),
    endpoints: (o.endpoints || []).map((e) => ({
      address: e.addresses[0], ready: (e.conditions || {}).ready !== false, leaving: !!(e.conditions || {}).terminating,
      node: e.nodeName || '', pod: e.targetRef && e.targetRef.kind === 'Pod' ? e.targetRef.name : '',
    })),
  };
}

// endpointsOf are the endpoints of a Service in the family that has more of them.
export function endpointsOf(key) {
  const by = new Map();
  for (const s of (state.slices.get(key) || new Map()).values()) by.set(s.family, (by.get(s.family) || []).concat(s.endpoints));
  return [...by.values()].sort((a, b) => b.length - a.length)[0] || [];
}

// Severity of what is shown of a Service, the worst last.
export const levels = ['good', 'none', 'wait', 'warn', 'bad'];

const answerLevel = { answers: 'good', sometimes: 'warn', 'not a Service': 'none' };

// judge returns the state of a Service: its level, the answer and cause in the words of 'fairlead explain', and why.
export function judge(s) {
  let asked = state.explained.get(s.key);
  if (asked && Date.now() - asked.at > explainedFor) {
    state.explained.delete(s.key);
    asked = null;
  }
  const found = asked || state.findings.get(s.key);
  const lines = state.concerns.get(s.key) || [];
  if (found && found.answer !== 'answers') {
    return { level: answerLevel[found.answer] || 'bad', answer: found.answer, cause: found.cause || '', why: found.text, source: found.source,
      remedy: found.remedy };
  }
  if (s.type === 'ExternalName') return { level: 'none', answer: 'alias', cause: '', why: 'its name is an alias of ' + s.alias };
  if (!state.judged) return { level: 'wait', answer: 'not judged yet', cause: '', why: '' };
  if (lines.length) return { level: 'warn', answer: 'look at this', cause: '', why: lines[0] };
  return { level: 'good', answer: 'answers', cause: '', why: '' };
}

// Changes.

function note(c) {
  const list = state.changes;
  let i = 0;
  while (i < list.length && list[i].at > c.at) i++;
  if (i >= maxChanges) return;
  for (let j = i; j < list.length && list[j].at === c.at; j++) {
    if (['service', 'what', 'who'].every((k) => list[j][k] === c[k])) return;
  }
  list.splice(i, 0, c);
  if (list.length > maxChanges) list.pop();
}

const newest = (ws) => ws.reduce((a, b) => (!a || b.at > a.at ? b : a), null);

// lastWrite returns the newest write of an object that its state before lacks. managedFields have whole seconds, so that the
// time does not tell which of two writers was the last; and a writer loses fields that another one takes over, at no new time.
function lastWrite(before, after) {
  const had = (same) => (w) => !(before ? before.writes : []).some((b) => b.who === w.who && b.part === w.part && same(b, w));
  return newest(after.writes.filter(had((b, w) => b.at === w.at))) || newest(after.writes.filter(had((b, w) => b.fields === w.fields)))
    || newest(after.writes);
}

function noteWrites(o, key, kind) {
  for (const w of o.writes) {
    note({ at: w.at, service: key, kind, what: `${w.how === 'Apply' ? 'applied' : 'wrote'} ${w.part || w.fields || 'it'}`, who: w.who });
  }
}

// noteDifference adds what a watch shows to have changed in the endpoints of a slice.
function noteDifference(before, after) {
  const was = new Map((before ? before.endpoints : []).map((e) => [e.address, e]));
  const who = lastWrite(after ? before : null, after || before);
  const add = (what, e) => note({ at: Date.now(), service: (after || before).service, kind: 'endpoint', who: who ? who.who : '',
    what: `${what}: ${e.pod ? 'Pod ' + e.pod + ' ' : ''}${e.address}` });
  for (const e of after ? after.endpoints : []) {
    const b = was.get(e.address);
    was.delete(e.address);
    if (!b) add(e.ready ? 'endpoint added' : 'endpoint added, not ready', e);
    else if (b.ready !== e.ready) add(e.ready ? 'endpoint is ready' : e.leaving ? 'endpoint terminates' : 'endpoint is not ready', e);
  }
  for (const e of was.values()) add('endpoint removed', e);
}

// The server's judgement.

const dirty = new Set();
const listed = new Set(); // the kinds that have been listed
let judging = false;
let all = true; // judge all Services when that may be
let nextAll = 0;
let lastAll = 0;
let waiting = 0;

function touch(key) {
  state.explained.delete(key);
  dirty.add(key);
  setTimeout(turn, 0);
}

const maxAsked = 100;
const minPause = 250;

const place = () => (state.namespace ? [['namespace', state.namespace]] : []);

// turn asks for the Services that changed, one question at a time and not faster than minPause; for all of them it asks so
// seldom that this takes a tenth of the time.
async function turn() {
  if (judging || listed.size < 2) return;
  const whole = (all || dirty.size > 3 * maxAsked) && Date.now() >= nextAll;
  if (!whole && !dirty.size) {
    if (all) waiting ||= setTimeout(() => { waiting = 0; turn(); }, nextAll - Date.now());
    return;
  }
  judging = true;
  const names = whole ? [] : [...dirty].slice(0, maxAsked);
  if (whole) {
    all = false;
    dirty.clear();
  } else {
    for (const n of names) dirty.delete(n);
  }
  const begin = performance.now();
  let rest = minPause;
  try {
    const { value } = await ask('/fairlead/services', whole ? place() : names.map((n) => ['service', n]));
    if (whole) {
      state.findings.clear();
      state.judged = true;
      lastAll = Date.now();
    }
    for (const n of names) state.findings.delete(n);
    for (const f of value) state.findings.set(f.service, f);
    state.trouble.delete('judgement');
    wantReport = true;
  } catch (e) {
    state.trouble.set('judgement', 'cannot judge the Services: ' + e.message);
    if (whole) all = true; else for (const n of names) dirty.add(n);
    rest = 5000;
  }
  if (whole) nextAll = Date.now() + 10 * (performance.now() - begin);
  changed();
  setTimeout(() => { judging = false; turn(); }, rest);
}

let wantReport = true;
let reporting = false;
let reportAfter = 0;
let mayReport = true;
let mayCertificates = true;

// aboutService finds the Service that a line of the report is about.
const aboutService = /(?:^|: )service ([^\s:]+\/[^\s:]+)/;

async function readReport() {
  try {
    const { value } = await ask('/fairlead/status', place());
    state.report = value;
    state.problems = value.problems;
    state.concerns.clear();
    for (const line of value.problems) {
      const [, key] = aboutService.exec(line) || [];
      if (key) state.concerns.set(key, (state.concerns.get(key) || []).concat(line));
    }
    state.trouble.delete('report');
    wantReport = false;
  } catch (e) {
    state.trouble.set('report', 'cannot get the report: ' + e.message);
    mayReport = e.code !== 403; // a right that is given later counts from the next load of the page
  }
}

async function report() {
  if (reporting || document.hidden || Date.now() < reportAfter || !(mayReport || mayCertificates)) return;
  reporting = true;
  const begin = performance.now();
  if (mayReport) await readReport();
  if (mayCertificates) {
    try {
      state.certificates = (await ask('/fairlead/certificates')).value;
    } catch (e) {
      state.certificates = null;
      mayCertificates = e.code !== 403 && e.code !== 404; // for administrators of a server of fairlead
    }
  }
  reportAfter = Date.now() + Math.max(2000, 10 * (performance.now() - begin));
  reporting = false;
  changed();
}

const reportEvery = 15000;
const allEvery = 60000;

function tick() {
  if (wantReport || Date.now() > reportAfter + reportEvery) report();
  if (!document.hidden && Date.now() - lastAll > allEvery && !judging) { all = true; turn(); }
}

// begin follows what the user may read, until the page is closed.
export function begin(namespace) {
  state.namespace = namespace;
  const signal = new AbortController().signal;
  const at = (group, kind) => group + (namespace && kind !== 'nodes' ? '/namespaces/' + namespace : '') + '/' + kind;
  const say = (kind) => (text) => {
    if (text) state.trouble.set(kind, `${kind}: ${text}`); else state.trouble.delete(kind);
    changed();
  };
  follow(at('/api/v1', 'services'), {
    state: say('Services'),
    reset(items) {
      state.services = new Map(items.map(serviceOf).map((s) => [s.key, s]));
      for (const s of state.services.values()) noteWrites(s, s.key, 'Service');
      listed.add('services');
      all = true;
      turn();
      changed();
    },
    one(type, o) {
      const s = serviceOf(o);
      const was = state.services.get(s.key);
      if (type === 'DELETED') { state.services.delete(s.key); state.findings.delete(s.key); } else state.services.set(s.key, s);
      const last = lastWrite(was, s);
      if (type !== 'MODIFIED' || !was || was.text !== s.text) {
        const what = { ADDED: 'created', DELETED: 'deleted' }[type] || 'wrote ' + ((last && last.fields) || 'it');
        note({ at: Date.now(), service: s.key, kind: 'Service', what, who: type === 'DELETED' || !last ? '' : last.who });
      }
      touch(s.key);
      changed();
    },
  }, signal);
  follow(at('/apis/discovery.k8s.io/v1', 'endpointslices'), {
    state: say('EndpointSlices'),
    reset(items) {
      state.slices = new Map();
      for (const s of items.map(sliceOf)) put(s);
      listed.add('slices');
      all = true;
      turn();
      changed();
    },
    one(type, o) {
      const s = sliceOf(o);
      const was = (state.slices.get(s.service) || new Map()).get(s.name);
      if (type === 'DELETED') (state.slices.get(s.service) || new Map()).delete(s.name); else put(s);
      noteDifference(was, type === 'DELETED' ? null : s);
      touch(s.service);
      changed();
    },
  }, signal);
  follow('/api/v1/nodes', {
    state(text, code) {
      state.nodesHidden = code === 403;
      say('Nodes')(code === 403 && namespace ? '' : text); // the user of one namespace need not see them
    },
    reset(items) { state.nodes = new Map(items.map((n) => [n.metadata.name, nodeOf(n)])); changed(); },
    one(type, o) {
      const n = nodeOf(o);
      const was = state.nodes.get(n.name);
      if (type === 'DELETED') state.nodes.delete(n.name); else state.nodes.set(n.name, n);
      if (!was || was.ready !== n.ready || type === 'DELETED') {
        note({ at: Date.now(), service: '', kind: 'Node', who: n.name, what: type === 'DELETED' ? 'removed' : n.ready ? 'is Ready' : 'is not Ready' });
        all = true;
        wantReport = true;
        turn();
      }
      changed();
    },
  }, signal);
  report();
  setInterval(tick, 1000);
  document.addEventListener('visibilitychange', tick);
}

function put(s) {
  if (!state.slices.has(s.service)) state.slices.set(s.service, new Map());
  state.slices.get(s.service).set(s.name, s);
}

function nodeOf(o) {
  const ready = (o.status.conditions || []).find((c) => c.type === 'Ready');
  return { name: o.metadata.name, ready: !!ready && ready.status === 'True', why: ready ? ready.message || ready.reason || '' : '',
    addresses: (o.status.addresses || []).filter((a) => a.type === 'InternalIP').map((a) => a.address) };
}

const eventsAtOnce = 500;
const maxEvents = 2000;

// readEvents returns the Events of the last hour, which are read when they are looked at, and whether there are more of them:
// the API gives them by their names, not by their times.
export async function readEvents() {
  const path = state.namespace ? `/api/v1/namespaces/${state.namespace}/events` : '/api/v1/events';
  const items = [];
  let more = '';
  do {
    const { value } = await ask(path, [['limit', String(eventsAtOnce)], ['continue', more]]);
    items.push(...value.items);
    more = value.metadata.continue || '';
  } while (more && items.length < maxEvents);
  const list = items.map((e) => ({
    at: Math.max(...[(e.series || {}).lastObservedTime, e.lastTimestamp, e.eventTime, e.metadata.creationTimestamp].map((t) => Date.parse(t) || 0)),
    service: e.involvedObject.kind === 'Service' ? e.involvedObject.namespace + '/' + e.involvedObject.name : '',
    kind: 'Event', who: (e.source || {}).component || e.reportingComponent || '', bad: e.type === 'Warning',
    what: `${e.involvedObject.kind} ${e.involvedObject.name}: ${e.reason}: ${e.message}`,
  })).filter((e) => Date.now() - e.at < hour);
  return { list, more: !!more };
}

// explain asks as 'fairlead explain SERVICE -o json' does, and keeps the answer for the map.
export async function explain(key, from, node) {
  const params = [['question', key]];
  const [namespace] = key.split('/');
  if (from) params.push(['from', from]);
  if (from || namespace) params.push(['namespace', namespace]);
  if (node) params.push(['node', node]);
  const answer = await ask('/fairlead/explain', params);
  const worst = answer.value.verdicts[0];
  if (!from && !node && worst) {
    const at = (worst.frontends || []).find((f) => f.answer === worst.answer && f.cause === worst.cause);
    const lines = ((at && at.lines) || worst.lines || []);
    const last = lines[lines.length - 1] || { text: '', source: '' };
    state.explained.set(key, { at: Date.now(), answer: worst.answer, cause: worst.cause, ...last, remedy: worst.remedy || '' });
    changed();
  }
  return answer;
}

export const history = (key) => ask('/fairlead/history', [['service', key]]);
