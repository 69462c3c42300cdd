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
    <div><dt>Services</dt><dd>${state.services.size}</dd><dd class="quiet">${kinds.map(([k, n]) => n + ' ' + k).join(', ')}</dd></div>
    <div><dt>endpoints</dt><dd>${endpoints}</dd><dd class="quiet">${ready} ready</dd></div>
    <div><dt>nodes</dt><dd>${state.nodes.size}</dd><dd class="quiet">${readyNodes} ready</dd></div>
    ${lb ? html`<div><dt>load balancer addresses</dt><dd>${lb.addresses}</dd><dd class="quiet">${lb.pools} pools, ${lb.pending} pending</dd></div>` : ''}</dl>`;
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
    <h2>Numbers</h2><${Numbers} /><h2>Nodes</h2><${Nodes} /><${Certificates} /></section>`;
}
