// The first view: what is wrong and what to do, and the state of nodes, addresses and certificates.
import { html, useMemo } from './preact-htm.js';
import { state, wrong, concerned, numbers } from './model.js';

const day = 86400e3;

const maxShown = 50;
const maxLines = 100;
const maxConcerns = 5; // lines about one Service

const More = ({ n, where }) => (n > 0 ? html`<li>${n} more${where}</li>` : '');

// A Service with a cause, and what the report says about it.
function Cause({ row: { key, j, lines }, open }) {
  return html`<li class=${j.level}><button class="link" onClick=${() => open(key)}>${key}</button>${' '}
    <span class=${'answer ' + j.level}>${j.answer}, ${j.cause}</span>
    <div>${j.why} <span class="source">[${j.source}]</span></div>${j.remedy ? html`<div class="remedy"><b>What to do:</b> ${j.remedy}</div>` : ''}
    ${lines.length ? html`<ul class="lines">${lines.slice(0, maxConcerns).map((l) => html`<li key=${l}>${l}</li>`)}
      <${More} n=${lines.length - maxConcerns} where="" /></ul>` : ''}</li>`;
}

// linesShown are lines of the report about what has no cause: nodes, Pods, and the concerned Services.
function linesShown() {
  const out = state.others.slice(0, maxLines);
  for (const row of concerned.list) {
    if (out.length >= maxLines) break;
    out.push(...row.lines);
  }
  return out.slice(0, maxLines);
}

function Wrong({ open }) {
  const causes = wrong.list.length;
  const others = state.others.length + numbers.lines;
  const blind = state.trouble.size;
  if (!causes && !others) {
    if (!state.judged || !state.report || blind) return html`<p role="status" class="headline wait">${
      blind ? 'not everything can be seen' : 'looking …'}</p>`;
    const { notProbed = 0, notAllowed = 0 } = state.report;
    if (!notProbed && !notAllowed) return html`<p role="status" class="headline good">nothing is wrong</p>`;
    return html`<p role="status" class="headline wait">nothing else is wrong that could be checked: ${[
      notProbed ? `${notProbed} endpoint${notProbed === 1 ? '' : 's'} written by hand not probed` : '',
      notAllowed ? `${notAllowed} node${notAllowed === 1 ? '' : 's'} not asked` : ''].filter(Boolean).join(', ')}</p>`;
  }
  return html`<p role="status" class="headline bad">${causes} Service${causes === 1 ? '' : 's'} with a cause, ${others} other problem${others === 1 ? '' : 's'}</p>
    <ul class="wrong">${wrong.list.slice(0, maxShown).map((row) => html`<${Cause} key=${row.key} row=${row} open=${open} />`)}
      <${More} n=${causes - maxShown} where=": see the map" />
      ${linesShown().map((l) => html`<li key=${l} class="warn">${l}</li>`)}
      <${More} n=${others - maxLines} where=": 'fairlead status' has them" /></ul>`;
}

const maxNodes = 200;

function Nodes() {
  const [all, report] = useMemo(() => [[...state.nodes.values()].sort((a, b) => a.ready - b.ready || (a.name < b.name ? -1 : 1)),
    new Map(((state.report || {}).nodes || []).map((n) => [n.name, n]))], [state.nodesVersion]);
  if (!all.length) return html`<p class="quiet">${state.nodesHidden ? 'you may not read Nodes' : 'no node has joined'}</p>`;
  return html`<div class="wide" tabindex="0" role="region" aria-label="Nodes"><table><caption class="unseen">Nodes</caption>
    <thead><tr><th>node</th><th>ready</th><th>address</th><th>Pods</th><th>mode</th><th>service ports</th><th>programmed</th></tr></thead>
    <tbody>${all.slice(0, maxNodes).map((n) => {
    const r = report.get(n.name);
    const p = r && r.programmed;
    return html`<tr key=${n.name}><td>${n.name}</td><td class=${n.ready ? 'good' : 'bad'}>${n.ready ? 'yes' : 'no: ' + n.why}</td>
      <td>${n.addresses.join(', ')}</td><td>${r ? r.pods : '-'}</td><td>${p ? p.mode : '-'}</td><td>${p ? p.servicePorts : '-'}</td>
      <td class=${p && !p.programmed ? 'bad' : ''}>${p ? (p.programmed ? 'yes' : 'no: ' + p.reason) : 'unknown'}</td></tr>`;
  })}${all.length > maxNodes ? html`<tr><td colspan="7">${all.length - maxNodes} more</td></tr>` : ''}</tbody></table></div>`;
}

function Numbers() {
  const readyNodes = useMemo(() => [...state.nodes.values()].filter((n) => n.ready).length, [state.nodesVersion]);
  const { endpoints, ready } = numbers;
  const kinds = Object.entries(numbers.kinds).filter(([, n]) => n > 0);
  const lb = (state.report || {}).loadBalancers;
  return html`<dl class="numbers">
    <div><dt>Services</dt><dd>${state.services.size}${state.partial ? ' or more' : ''}</dd><dd class="quiet">${kinds.map(([k, n]) => n + ' ' + k).join(', ')}</dd></div>
    <div><dt>endpoints</dt><dd>${endpoints}</dd><dd class="quiet">${ready} ready</dd></div>
    <div><dt>nodes</dt><dd>${state.nodes.size}</dd><dd class="quiet">${readyNodes} ready</dd></div>
    ${lb ? html`<div><dt>load balancer addresses</dt><dd>${lb.addresses}</dd><dd class="quiet">${lb.pools} pools, ${lb.pending} pending</dd></div>` : ''}</dl>`;
}

const maxRows = 200;

const Table = ({ name, heads, rows, none, more = 0, where = '' }) => (rows.length ? html`<div class="wide" tabindex="0" role="region" aria-label=${name}><table>
  <caption class="unseen">${name}</caption><thead><tr>${heads.map((h) => html`<th key=${h}>${h}</th>`)}</tr></thead>
  <tbody>${rows}${more > 0 ? html`<tr><td colspan=${heads.length}>${more} more${where}</td></tr>` : ''}</tbody></table></div>`
  : html`<p class="quiet">${none}</p>`);

// The class of what the server has judged: it decides what is served, what has a problem, what is foreign and what is not known.
const standing = { served: 'good', problem: 'bad' };
const Standing = ({ of, why }) => html`<td class=${standing[of] || 'quiet'}>${of}${why ? ': ' + why : ''}</td>`;

// who announces an address, one line for each node; the others' reasons are in the explanation of the Service.
function Announcers({ a }) {
  const live = a.owners.filter((o) => !o.stale);
  if (live.length) return html`<ul class="lines">${live.map((o) => html`<li key=${o.node + o.via}>node ${o.node}, ${o.via}${o.interface ? ' on ' + o.interface : ''} <span class="quiet">since ${
    new Date(o.since).toLocaleString()}${o.reason ? ': ' + o.reason : ''}</span></li>`)}
    <${More} n=${a.ownersLeft || 0} where=" nodes" /></ul>`;
  return '-';
}

function Balancers({ open }) {
  const b = state.balancers;
  if (!b) return state.balancersTrouble ? html`<h2>Load balancers and routes</h2><p class="trouble">${state.balancersTrouble}</p>` : '';
  const name = (s) => html`<td><button class="link" onClick=${() => open(s.namespace + '/' + s.name)}>${s.namespace}/${s.name}</button></td>`;
  const addresses = b.services.slice(0, maxRows).flatMap((s) => (s.pending
    ? [html`<tr key=${s.namespace + s.name}>${name(s)}<td>none yet</td><td>${s.way}</td><td>-</td><td>-</td><${Standing} of=${s.status} why=${s.reason} /></tr>`]
    : s.addresses.map((a) => html`<tr key=${s.namespace + s.name + a.address}>${name(s)}<td>${a.address}</td><td>${s.way}</td><td>${a.pool || '-'}</td>
      <td><${Announcers} a=${a} /></td><${Standing} of=${a.status} why=${[a.reason, a.status === 'problem' || a.status === 'unknown' ? s.reason : ''].filter(Boolean).join(': ')} /></tr>`)));
  const routes = b.routes.slice(0, maxRows).map((r) => html`<tr key=${r.kind + r.namespace + r.name}><td>${r.kind}</td>
    <td>${r.namespace}/${r.name}</td><td>${(r.hosts || []).join(', ') || 'all'}</td><td>${(r.parents || []).join(', ') || '-'}</td>
    <${Standing} of=${r.status} why=${r.reason} /></tr>`);
  return html`${state.balancersTrouble ? html`<p class="trouble">${state.balancersTrouble}</p>` : ''}
    ${(b.problems || []).map((p) => html`<p key=${p} class="quiet">${p}</p>`)}
    <h2>Load balancer addresses</h2><${Table} name="Load balancer addresses" heads=${['Service', 'address', 'way', 'pool', 'announced by', 'status']}
      rows=${addresses} more=${(b.servicesLeft || 0) + Math.max(0, b.services.length - maxRows)} where=" Services: 'fairlead lb status' has them"
      none="no Service is of type LoadBalancer" />
    <h2>Routes</h2><${Table} name="Routes" heads=${['kind', 'route', 'hosts', 'of', 'status']} rows=${routes}
      more=${(b.routesLeft || 0) + Math.max(0, b.routes.length - maxRows)} none="no route and no Ingress" />`;
}

function Certificates() {
  const c = state.certificates;
  if (!c) return '';
  const list = [...(c.authorities || []).map((a) => ({ what: 'authority ' + a.subject, ends: a.ends })),
    ...(c.certificates || []).map((a) => ({ what: a.name + ' of server ' + c.server, ends: a.ends })),
    ...(c.others || []).map((a) => ({ what: a.holder, ends: a.ends }))]
    .filter((x) => Date.parse(x.ends) > 0).sort((a, b) => Date.parse(a.ends) - Date.parse(b.ends)).slice(0, 5);
  return html`<h2>Certificates that end first</h2><ul>${list.map((x) => html`<li key=${x.what}>${x.what}: ends in ${
    Math.floor((Date.parse(x.ends) - Date.now()) / day)} days</li>`)}</ul>`;
}

export function Overview({ open }) {
  return html`<section class="overview" aria-label="Overview"><h2>What is wrong</h2><${Wrong} open=${open} />
    <h2>Numbers</h2><${Numbers} /><h2>Nodes</h2><${Nodes} /><${Balancers} open=${open} /><${Certificates} /></section>`;
}
