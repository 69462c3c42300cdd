// The map: who asks by which address, the Service, and the endpoints that may answer; a row for each Service. Only the rows
// in sight are in the document.
import { html, useState, useEffect, useMemo, useRef } from './preact-htm.js';
import { state, endpointsOf, find } from './model.js';
import { Asks, flows } from './flows.js';

const rowHeight = 64; // px, as style.css has it
const step = 4; // rows after whose edge other ones are drawn
const spare = 4 + step; // rows beyond the edges

function ways(s) {
  const ports = s.ports.map((p) => p.port + (p.protocol === 'TCP' ? '' : '/' + p.protocol)).join(', ');
  const out = [];
  if (s.balancers.length) out.push(['load balancer', s.balancers.join(', ') + ' : ' + ports]);
  if (s.external.length) out.push(['external IP', s.external.join(', ') + ' : ' + ports]);
  const nodes = s.ports.filter((p) => p.node).map((p) => p.node);
  if (nodes.length) out.push(['node port', nodes.join(', ')]);
  if (s.ips[0] && s.ips[0] !== 'None') out.push(['Pods, nodes', s.ips[0] + ' : ' + ports]);
  if (s.ips[0] === 'None') out.push(['Pods, nodes', 'by name']);
  if (s.alias) out.push(['Pods, nodes', 'by name']);
  return out;
}

const maxDots = 16;

function Endpoints({ list, of }) {
  const ready = list.filter((e) => e.ready).length;
  const nodes = new Set(list.map((e) => e.node).filter(Boolean)).size;
  if (of.alias) return html`<span>${of.alias}</span>`;
  if (!list.length) return html`<span class="quiet">no endpoint</span>`;
  const dots = list.slice(0, maxDots).map((e) => html`<i key=${e.address} class=${'dot ' + (e.ready ? 'good' : 'off')}
    title=${`${e.pod || e.address}${e.node ? ' on ' + e.node : ''}: ${e.ready ? 'ready' : e.leaving ? 'terminating' : 'not ready'}`}></i>`);
  return html`<span>${ready} of ${list.length} ready${nodes ? ` on ${nodes} node${nodes > 1 ? 's' : ''}` : ''}
    <span class="dots" aria-hidden="true">${dots}${list.length > maxDots ? ' +' + (list.length - maxDots) : ''}</span></span>`;
}

function Row({ s, j, index, open, selected }) {
  const first = ways(s).slice(0, 2);
  return html`<div role="row" class=${'row ' + j.level + (selected ? ' selected' : '')} aria-rowindex=${index + 2} style=${{ top: index * rowHeight + 'px' }}>
    <div role="cell" class="in">${first.map(([who, at]) => html`<span key=${who} class="way"><b>${who}</b> ${at}</span>`)}<${Asks} of=${s.key} /></div>
    <div role="cell" class="edge" aria-hidden="true"><i></i></div>
    <div role="cell" class="it"><button class="link" data-row=${index} onClick=${() => open(s.key)}><span class="quiet">${s.namespace}/</span>${s.name}</button>
      <span class="quiet">${s.type}${s.policy ? ', policy ' + s.policy : ''}</span></div>
    <div role="cell" class=${'edge ' + j.level} aria-hidden="true"><i></i></div>
    <div role="cell" class="out"><span class=${'answer ' + j.level}>${j.answer}${j.cause ? ', ' + j.cause : ''}</span>
      ${j.why && j.level !== 'good' ? html`<span class="why" title=${j.why}>${j.why}</span>` : html`<${Endpoints} list=${endpointsOf(s.key)} of=${s} />`}</div>
  </div>`;
}

// edge is the place of the list from which its rows are drawn: it moves by steps.
const edge = (y) => Math.floor(y / (step * rowHeight)) * step * rowHeight;

// kept returns what make has drawn of a row, again if nothing that it uses is another one: preact then passes over the row. before and
// after are what was drawn last, and is now, by the key of the Service.
function kept(before, after, key, uses, make) {
  const was = before.get(key);
  const it = was && was.uses.every((u, i) => u === uses[i]) ? was : { uses, drawn: make() };
  after.set(key, it);
  return it.drawn;
}

export function Map_({ open, selected }) {
  const [search, setSearch] = useState('');
  const [only, setOnly] = useState(false);
  const [top, setTop] = useState(0);
  const [height, setHeight] = useState(600);
  const box = useRef(null);
  const drawn = useRef(new Map());
  useEffect(() => {
    const measure = new ResizeObserver(() => setHeight(box.current.clientHeight));
    measure.observe(box.current);
    return () => measure.disconnect();
  }, []);
  const rows = useMemo(() => find(search, only), [search, only]).list;
  const from = Math.max(0, Math.floor(top / rowHeight) - spare);
  const to = Math.min(rows.length, Math.ceil((top + height) / rowHeight) + spare);
  const before = drawn.current;
  drawn.current = new Map();
  const shown = rows.slice(from, to).map((row, i) => kept(before, drawn.current, row.key,
    [row, from + i, row.key === selected, open, flows.version, state.nodesVersion], () => html`<${Row} key=${row.key} s=${row.s} j=${row.j}
      index=${from + i} open=${open} selected=${row.key === selected} />`));
  const keys = (e) => {
    const by = { ArrowDown: 1, ArrowUp: -1, PageDown: 8, PageUp: -8 }[e.key];
    const at = e.target.dataset && e.target.dataset.row;
    if (!by || at === undefined) return;
    e.preventDefault();
    const next = Math.min(rows.length - 1, Math.max(0, Number(at) + by));
    const y = next * rowHeight;
    if (y < box.current.scrollTop) box.current.scrollTop = y;
    if (y + rowHeight > box.current.scrollTop + height) box.current.scrollTop = y + rowHeight - height;
    setTop(edge(box.current.scrollTop));
    setTimeout(() => { const b = box.current && box.current.querySelector(`[data-row="${next}"]`); if (b) b.focus({ preventScroll: true }); }, 0);
  };
  return html`<section class="map" aria-label="Map of Services">
    <div class="tools">
      <label>Search <input type="search" id="search" value=${search} placeholder="name, address, label, Pod, cause"
        onInput=${(e) => { setSearch(e.target.value); box.current.scrollTop = 0; }} /></label>
      <label class="check"><input type="checkbox" checked=${only} onChange=${(e) => setOnly(e.target.checked)} /> only what is wrong</label>
      <span role="status" class="quiet">${rows.length} of ${state.services.size}${state.partial ? ' or more' : ''} Services</span>
    </div>
    <div class="table" role="table" aria-label="Services" aria-rowcount=${rows.length + 1}>
      <div role="rowgroup"><div role="row" class="head" aria-rowindex="1">
        <div role="columnheader" class="in">clients</div><div role="columnheader" class="edge"><span class="unseen">way in</span></div>
        <div role="columnheader" class="it">Service</div><div role="columnheader" class="edge"><span class="unseen">way out</span></div>
        <div role="columnheader" class="out">endpoints</div></div></div>
      <div role="rowgroup" class="box" ref=${box} tabindex="0" aria-label="list of Services" onScroll=${(e) => setTop(edge(e.target.scrollTop))} onKeyDown=${keys}>
        <div role="presentation" class="all" style=${{ height: rows.length * rowHeight + 'px' }}>
          ${shown}
        </div>
      </div>
    </div>
  </section>`;
}
