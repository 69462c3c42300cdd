// Where the page's knowledge is from: watches of objects, cut down to what is shown, and the server's judgement of them.
import { ask, follow } from './api.js';
import { take, forget } from './flows.js';
import { state, changed, isService, setServices, setService, setSlices, setSlice, setFindings, setReport, setExplained } from './model.js';

const maxChanges = 1000;
export const hour = 3600e3;

// seen is the newest version of an object of each kind. Pages that have seen the same share the server's judgement. A list does not
// show what was deleted: of unshared the next answer must be a new one.
const seen = { services: 0, slices: 0, nodes: 0 };
const unshared = new Set();
let shares = true; // an older server does not know the parameter

function relisted(kind, versions) {
  seen[kind] = versions.reduce((a, v) => Math.max(a, Number(v)), 0);
  unshared.add('/fairlead/services').add('/fairlead/status');
}

// judged asks for a judgement. Versions that are not numbers cannot be compared.
async function judged(path, params, whole) {
  const newest = Math.max(...Object.values(seen));
  const anew = whole && unshared.delete(path);
  try {
    if (anew || !shares || !(newest > 0)) return await ask(path, params);
    return await ask(path, [...params, ['seen', newest]]);
  } catch (e) {
    if (anew) unshared.add(path);
    if (e.code !== 400 || !shares) throw e;
    shares = false;
    return ask(path, params);
  }
}

const keyOf = (o) => o.metadata.namespace + '/' + o.metadata.name;

// writes are who wrote which fields of an object, and when, within the last hour.
function writes(o) {
  if (o.metadata.written) return o.metadata.written; // the server has read them
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
    key: keyOf(o), version: o.metadata.resourceVersion, generation: o.metadata.generation || 0, kind: 'Service', namespace: o.metadata.namespace, name: o.metadata.name, type: s.type, created: o.metadata.creationTimestamp,
    ips: (s.clusterIPs || []).filter(Boolean), external: s.externalIPs || [], alias: s.externalName || '',
    balancers: ((o.status.loadBalancer || {}).ingress || []).map((i) => i.ip || i.hostname),
    ports: (s.ports || []).map((p) => ({ port: p.port, protocol: p.protocol, node: p.nodePort || 0, target: String(p.targetPort ?? p.port) })),
    selector: Object.entries(s.selector || {}).map(([k, v]) => k + '=' + v).sort().join(','),
    policy: [s.internalTrafficPolicy, s.externalTrafficPolicy].includes('Local') ? 'Local' : '',
    writes: writes(o), text: JSON.stringify(s),
  };
}

// sameSpec reports whether two states of a Service have one spec. The generation tells, of a server that counts it; the text is not
// the one of a spec that the server has cut down.
const sameSpec = (a, b) => (a.generation && b.generation ? a.generation === b.generation : a.text === b.text);

function sliceOf(o) {
  return {
    id: keyOf(o), name: o.metadata.name, version: o.metadata.resourceVersion,
    service: o.metadata.namespace + '/' + ((o.metadata.labels || {})['kubernetes.io/service-name'] || ''),
    family: o.addressType, ports: (o.ports || []).map((p) => p.port), writes: writes(o),
    endpoints: (o.endpoints || []).map((e) => ({
      address: e.addresses[0], ready: (e.conditions || {}).ready !== false, leaving: !!(e.conditions || {}).terminating,
      node: e.nodeName || '', pod: e.targetRef && e.targetRef.kind === 'Pod' ? e.targetRef.name : '',
    })),
  };
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

let ended = ''; // what to do when the server no longer accepts who asks
let out = false; // it does not
const dirty = new Set();
const listed = new Set(); // the kinds that have been listed
let judging = false;
let all = true; // judge all Services when that may be
let nextAll = 0;
let lastAll = 0;
let waiting = 0;

function touch(key) {
  if (key.endsWith('/')) return; // of a slice without a Service
  dirty.add(key);
  setTimeout(turn, 0);
}

// fail shows what could not be read, and why. After a 401 nothing else counts, and nothing more is asked.
function fail(kind, text, code) {
  if (code === 401) {
    out = true;
    state.trouble.clear();
    state.trouble.set('login', ended);
  } else if (!out) {
    state.trouble.set(kind, text);
  }
}

const maxAsked = 100;
const minPause = 250;

const place = () => (state.namespace ? [['namespace', state.namespace]] : []);

// turn asks for the Services that changed, one question at a time and not faster than minPause; for all of them it asks so
// seldom that this takes a tenth of the time.
async function turn() {
  if (out || judging || listed.size < 2) return;
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
    const { value } = await judged('/fairlead/services', whole ? place() : names.map((n) => ['service', n]), whole);
    if (whole) lastAll = Date.now();
    setFindings(value, whole ? null : names);
    state.trouble.delete('judgement');
    wantReport = true;
  } catch (e) {
    fail('judgement', 'cannot judge the Services: ' + e.message, e.code);
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

async function readReport() {
  try {
    setReport((await judged('/fairlead/status', [...place(), ['services', 'false']], true)).value);
    state.trouble.delete('report');
    wantReport = false;
  } catch (e) {
    fail('report', 'cannot get the report: ' + e.message, e.code);
    mayReport = e.code !== 403; // a right that is given later counts from the next load of the page
  }
}

async function report() {
  if (out || reporting || document.hidden || Date.now() < reportAfter || !(mayReport || mayCertificates)) return;
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

const flowsEvery = 10000; // ms
const flowsRest = 60000; // after an answer that has none
let flowsAfter = 0;

// readFlows asks what nodes count. Who may not ask nodes sees no clients, and the rest of the page as ever.
async function readFlows() {
  if (out || document.hidden || Date.now() < flowsAfter) return;
  flowsAfter = Infinity;
  try {
    const answer = (await ask('/fairlead/connections', place())).value;
    take(answer, Date.parse(answer.at));
    flowsAfter = Date.now() + flowsEvery;
  } catch (e) {
    forget('the connections are not known: ' + e.message);
    flowsAfter = Date.now() + flowsRest;
  }
  changed();
}

const balancersEvery = 15000; // ms
let balancersAfter = 0;

// readBalancers asks who announces the addresses of load balancers, and which routes are served.
async function readBalancers() {
  if (out || document.hidden || Date.now() < balancersAfter) return;
  balancersAfter = Infinity;
  const begin = performance.now();
  try {
    state.balancers = (await ask('/fairlead/balancers', place())).value;
    state.balancersTrouble = '';
  } catch (e) {
    state.balancersTrouble = 'the load balancers and routes are not known: ' + e.message;
    if (e.code === 401) fail('balancers', '', 401);
  }
  balancersAfter = Date.now() + Math.max(balancersEvery, 10 * (performance.now() - begin));
  changed();
}

const reportEvery = 15000;
const allEvery = 60000;

const heard = new Set(); // the kinds that are listed, or could not be
const listsFirst = 10000; // ms; for how long other questions wait for that
let listsBegan = 0;

// tick asks what is due. The lists come first: the server answers only so many questions of a user at a time.
function tick() {
  if (Date.now() - listsBegan < listsFirst && !(heard.has('Services') && heard.has('EndpointSlices'))) return;
  readFlows();
  readBalancers();
  if (wantReport || Date.now() > reportAfter + reportEvery) report();
  if (!document.hidden && Date.now() - lastAll > allEvery && !judging) { all = true; turn(); }
}

// begin follows what the user may read, until the page is closed. whenEnded says what to do when the server no longer accepts
// the user.
export function begin(namespace, whenEnded) {
  state.namespace = namespace;
  ended = whenEnded;
  const signal = new AbortController().signal;
  const at = (group, kind) => group + (namespace && kind !== 'nodes' ? '/namespaces/' + namespace : '') + '/' + kind;
  const say = (kind) => (text, code) => {
    if (text) fail(kind, `${kind}: ${text}`, code); else state.trouble.delete(kind);
    if (!heard.has(kind)) {
      heard.add(kind);
      tick();
    }
    changed();
  };
  follow(at('/api/v1', 'services'), {
    state: say('Services'),
    read: serviceOf,
    short: ['services', namespace],
    some(items) {
      if (listed.has('services')) return; // a list that is read again replaces the one that is shown
      setServices(items);
      state.partial = true;
      changed();
    },
    reset(items) {
      relisted('services', items.map((s) => s.version));
      setServices(items);
      state.partial = false;
      for (const s of state.services.values()) noteWrites(s, s.key, 'Service');
      listed.add('services');
      all = true;
      turn();
      changed();
    },
    one(type, o) {
      const s = serviceOf(o);
      seen.services = Number(s.version);
      const was = state.services.get(s.key);
      setService(s.key, type === 'DELETED' ? null : s);
      const last = lastWrite(was, s);
      if (type !== 'MODIFIED' || !was || !sameSpec(was, s)) {
        const what = { ADDED: 'created', DELETED: 'deleted' }[type] || 'wrote ' + ((last && last.fields) || 'it');
        note({ at: Date.now(), service: s.key, kind: 'Service', what, who: type === 'DELETED' || !last ? '' : last.who });
      }
      touch(s.key);
      changed();
    },
  }, signal);
  follow(at('/apis/discovery.k8s.io/v1', 'endpointslices'), {
    state: say('EndpointSlices'),
    read: sliceOf,
    short: ['endpointslices', namespace],
    reset(items) {
      relisted('slices', items.map((s) => s.version));
      setSlices(items);
      listed.add('slices');
      all = true;
      turn();
      changed();
    },
    one(type, o) {
      const s = sliceOf(o);
      seen.slices = Number(s.version);
      const { before, keys } = setSlice(s, type === 'DELETED');
      if (keys.length > 1) { // the label names another Service
        noteDifference(before, null);
        noteDifference(null, s);
      } else {
        noteDifference(before, type === 'DELETED' ? null : s);
      }
      keys.forEach(touch);
      changed();
    },
  }, signal);
  follow('/api/v1/nodes', {
    state(text, code) {
      state.nodesHidden = code === 403;
      say('Nodes')(code === 403 && namespace ? '' : text, code); // the user of one namespace need not see them
    },
    reset(items) {
      relisted('nodes', items.map((n) => n.metadata.resourceVersion));
      state.nodes = new Map(items.map((n) => [n.metadata.name, nodeOf(n)]));
      state.nodesVersion++;
      changed();
    },
    one(type, o) {
      const n = nodeOf(o);
      seen.nodes = Number(o.metadata.resourceVersion);
      const was = state.nodes.get(n.name);
      if (type === 'DELETED') state.nodes.delete(n.name); else state.nodes.set(n.name, n);
      state.nodesVersion++;
      if (!was || was.ready !== n.ready || type === 'DELETED') {
        note({ at: Date.now(), service: '', kind: 'Node', who: n.name, what: type === 'DELETED' ? 'removed' : n.ready ? 'is Ready' : 'is not Ready' });
        all = true;
        wantReport = true;
        turn();
      }
      changed();
    },
  }, signal);
  listsBegan = Date.now();
  setInterval(tick, 1000);
  document.addEventListener('visibilitychange', tick);
}

function nodeOf(o) {
  const ready = (o.status.conditions || []).find((c) => c.type === 'Ready');
  return { name: o.metadata.name, ready: !!ready && ready.status === 'True', why: ready ? ready.message || ready.reason || '' : '',
    addresses: (o.status.addresses || []).filter((a) => a.type === 'InternalIP').map((a) => a.address) };
}

const eventsAtOnce = 500;
const maxEvents = 2000;

// readEvents returns the Events of the last hour about one Service, or about everything if of is empty, which are read when they
// are looked at, and whether there are more of them: the API gives them by their names, not by their times.
export async function readEvents(of, signal) {
  const [at, name] = of ? of.split('/') : [state.namespace];
  const path = at ? `/api/v1/namespaces/${at}/events` : '/api/v1/events';
  const about = name ? [['fieldSelector', 'involvedObject.kind=Service,involvedObject.name=' + name]] : [];
  const items = [];
  let more = '';
  do {
    const { value } = await ask(path, [...about, ['limit', String(eventsAtOnce)], ['continue', more]], signal);
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

// explain asks as 'fairlead explain QUESTION -o json' does: for a Service by its key, a name, or an address with a port. The answer
// about a Service is kept for the map.
export async function explain(question, from, node, signal) {
  const key = isService(question) ? question : '';
  const params = [['question', question]];
  const namespace = key ? key.split('/')[0] : state.namespace;
  if (namespace) params.push(['namespace', namespace]);
  if (from) params.push(['from', from]);
  if (node) params.push(['node', node]);
  const answer = await ask('/fairlead/explain', params, signal);
  if (key && !from && !node && answer.value.finding) {
    setExplained(key, answer.value.finding);
    changed();
  }
  return answer;
}

export const history = (key, signal) => ask('/fairlead/history', [['service', key]], signal);
