// The first view: what is wrong and what to do, and the state of nodes, addresses and certificates.
import { html } from './preact-htm.js';
import { state, judge } from './store.js';

const day = 86400e3;

function wrong() {
  const out = [];
  for (const s of state.services.values()) {
    const j = judge(s);
    if (j.cause) out.push([s, j]);
  }
  return out.sort((a, b) => (a[1].level < b[1].level ? -1 : a[1].level > b[1].level ? 1 : a[0].key < b[0].key ? -1 : 1));
}

const maxShown = 50;

function Wrong({ open }) {
  const list = wrong();
  const named = new Set(list.map(([s]) => s.key));
  // A Service that is above with its cause is not repeated.
  const lines = state.problems.filter((l) => { const m = /^service ([^\s:]+)/.exec(l); return !m || !named.has(m[1]); });
  const blind = [...state.trouble.values()];
  if (!list.length && !lines.length) {
    if (!state.judged || !state.report || blind.length) return html`<p role="status" class="headline wait">${
      blind.length ? 'not everything can be seen' : 'looking …'}</p>`;
    return html`<p role="status" class="headline good">nothing is wrong</p>`;
  }
  return html`<p role="status" class="headline bad">${list.length} Service${list.length === 1 ? '' : 's'} with a cause, ${lines.length} other problem${lines.length === 1 ? '' : 's'}</p>
    <ul class="wrong">${list.slice(0, maxShown).map(([s, j]) => html`<li key=${s.key} class=${j.level}>
      <button class="link" onClick=${() => open(s.key)}>${s.key}</button> <span class=${'answer ' + j.level}>${j.answer}, ${j.cause}</span>
      <div>${j.why} <span class="source">[${j.source}]</span></div>${j.remedy ? html`<div class="remedy"><b>What to do:</b> ${j.remedy}</div>` : ''}</li>`)}
      ${list.length > maxShown ? html`<li>${list.length - maxShown} more: see the map</li>` : ''}
      ${lines.slice(0, 2 * maxShown).map((l) => html`<li key=${l} class="warn">${l}</li>`)}</ul>`;
}

function Nodes() {
  const report = new Map(((state.report || {}).nodes || []).map((n) => [n.name, n]));
  const all = [...state.nodes.values()].sort((a, b) => a.ready - b.ready || (a.name < b.name ? -1 : 1));
  if (!all.length) return html`<p class="quiet">${state.nodesHidden ? 'you may not read Nodes' : 'no node has joined'}</p>`;
  return html`<div class="wide" tabindex="0" role="region" aria-label="Nodes"><table><caption class="unseen">Nodes</caption>
    <thead><tr><th>node</th><th>ready</th><th>address</th><th>Pods</th><th>mode</th><th>service ports</th><th>programmed</th></tr></thead>
    <tbody>${all.slice(0, 200).map((n) => {
    const r = report.get(n.name);
    const p = r && r.programmed;
    return html`<tr key=${n.name}><td>${n.name}</td><td class=${n.ready ? 'good' : 'bad'}>${n.ready ? 'yes' : 'no: ' + n.why}</td>
      <td>${n.addresses.join(', ')}</td><td>${r ? r.pods : '-'}</td><td>${p ? p.mode : '-'}</td><td>${p ? p.servicePorts : '-'}</td>
      <td class=${p && !p.programmed ? 'bad' : ''}>${p ? (p.programmed ? 'yes' : 'no: ' + p.reason) : 'unknown'}</td></tr>`;
  })}</tbody></table></div>`;
}

function Numbers() {
  let ready = 0;
  let endpoints = 0;
  const kinds = {};
  for (const s of state.services.values()) kinds[s.type] = (kinds[s.type] || 0) + 1;
  for (const of of state.slices.values()) for (const s of of.values()) for (const e of s.endpoints) { endpoints++; if (e.ready) ready++; }
  const lb = (state.report || {}).loadBalancers;
  return html`<dl class="numbers">
    <div><dt>Services</dt><dd>${state.services.size}</dd><dd class="quiet">${Object.entries(kinds).map(([k, n]) => n + ' ' + k).join(', ')}</dd></div>
    <div><dt>endpoints</dt><dd>${endpoints}</dd><dd class="quiet">${ready} ready</dd></div>
    <div><dt>nodes</dt><dd>${state.nodes.size}</dd><dd class="quiet">${[...state.nodes.values()].filter((n) => n.ready).length} ready</dd></div>
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
