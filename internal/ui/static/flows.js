// Who asks: the connections of each Service as nodes count them, its clients, and the rates of the last hour, which this page keeps.
import { html } from './preact-htm.js';
import { state, nameOf } from './model.js';

const hour = 3600e3;
const maxPoints = 360; // an hour of one each 10 s
const maxSeries = 500; // Services; of more, the ones with the last connections
const maxGap = 60e3; // ms between two points that a line joins

// by has what is counted, by the key of the Service. version grows with each change of it.
export const flows = { at: 0, version: 0, by: new Map(), trouble: '' };

// forget takes away what was counted, and says why.
export function forget(trouble) {
  Object.assign(flows, { at: 0, version: flows.version + 1, by: new Map(), trouble });
}
const series = new Map(); // by the key of the Service, the one that had traffic last at the end

// take takes in an answer of the server.
export function take(answer, at) {
  const by = new Map();
  for (const p of answer.services) {
    const key = p.namespace + '/' + p.service;
    const f = by.get(key) || { connections: 0, lost: 0, open: 0, sent: 0, received: 0, clients: new Map() };
    f.connections += p.connections;
    f.lost += p.refusedPackets + p.droppedPackets;
    if (p.open) {
      f.open += p.open.connections;
      f.sent += p.open.sent.bytes;
      f.received += p.open.received.bytes;
    }
    for (const c of p.clients || []) {
      const o = f.clients.get(c.address) || { open: 0, sent: 0, received: 0 };
      f.clients.set(c.address, { open: o.open + c.connections, sent: o.sent + c.sent.bytes, received: o.received + c.received.bytes });
    }
    by.set(key, f);
  }
  if (at === flows.at) return; // an answer that the server has kept
  const seconds = (at - flows.at) / 1000;
  // Counts of other nodes than before have no difference.
  const comparable = flows.at && seconds > 0 && at - flows.at < maxGap && flows.nodes === answer.nodes.join();
  for (const [key, f] of by) {
    f.clients = [...f.clients].map(([address, c]) => ({ address, ...c })).sort((a, b) => b.open - a.open);
    const was = flows.by.get(key) || { connections: 0, lost: 0 };
    if (!comparable || f.connections < was.connections || f.lost < was.lost) continue;
    f.rate = (f.connections - was.connections) / seconds;
    f.errors = (f.lost - was.lost) / seconds;
    const known = series.get(key);
    if (!known && !f.rate && !f.errors) continue; // it begins with the first traffic
    if (f.rate || f.errors || known.length < 2) series.delete(key); // to the end
    const points = known || [];
    points.push({ at, rate: f.rate, errors: f.errors });
    while (points.length > maxPoints || at - points[0].at > hour) points.shift();
    series.set(key, points);
  }
  for (const key of series.keys()) {
    if (series.size > maxSeries || !state.services.has(key)) series.delete(key);
  }
  const more = answer.notAsked ? [`${answer.notAsked} more nodes were not asked`] : [];
  Object.assign(flows, { at, version: flows.version + 1, by, nodes: answer.nodes.join(), trouble: answer.problems.concat(more).join('; ') });
}

export const seriesOf = (key) => series.get(key) || [];

const rate = (n) => (n === undefined ? '-' : n >= 100 ? String(Math.round(n)) : n.toFixed(1));

export function size(n) {
  let unit = 0;
  for (; n >= 1024 && unit < 4; unit++) n /= 1024;
  return (unit ? n.toFixed(1) : n) + [' B', ' KiB', ' MiB', ' GiB', ' TiB'][unit];
}

// Asks is who asks a Service now, in a few words.
export function Asks({ of }) {
  const f = flows.by.get(of);
  if (!f) return '';
  const names = f.clients.slice(0, 2).map((c) => nameOf(c.address));
  const more = f.clients.length > 2 ? ' …' : '';
  return html`<span class="way asks">${f.open} open${f.rate === undefined ? '' : `, ${rate(f.rate)}/s`}${
    f.errors ? html`, <b class="answer bad">${rate(f.errors)}/s lost</b>` : ''}${names.length ? ': ' + names.join(', ') + more : ''}</span>`;
}

const wide = 300;
const high = 48;

// Line is one figure of the last hour.
function Line({ points, of, what, bad }) {
  const now = points[points.length - 1].at;
  const most = Math.max(...points.map((p) => p[of]));
  let path = '';
  let last = 0;
  for (const p of points) {
    const x = wide - (now - p.at) / hour * wide;
    const y = high - (most ? p[of] / most : 0) * (high - 4) - 1;
    path += `${p.at - last > maxGap ? 'M' : 'L'}${x.toFixed(1)},${y.toFixed(1)}`;
    last = p.at;
  }
  const text = `${what} a second: now ${rate(points[points.length - 1][of])}, at most ${rate(most)} in the last ${
    Math.max(1, Math.round((now - points[0].at) / 60e3))} min`;
  return html`<figure class="series"><svg role="img" aria-label=${text} viewBox=${`0 0 ${wide} ${high}`} preserveAspectRatio="none">
    <path d=${path} class=${bad ? 'bad' : ''} /></svg><figcaption>${text}</figcaption></figure>`;
}

const maxClients = 10;

// Traffic is who asks a Service, and how often.
export function Traffic({ of }) {
  const f = flows.by.get(of);
  const points = seriesOf(of);
  return html`<h3>Who asks</h3>
    ${flows.trouble ? html`<p class="quiet">${flows.trouble}</p>` : ''}
    ${f && f.clients.length ? html`<div class="wide" tabindex="0" role="region" aria-label="Clients"><table><caption class="unseen">Clients</caption>
      <thead><tr><th>client</th><th>open</th><th>sent</th><th>received</th></tr></thead>
      <tbody>${f.clients.slice(0, maxClients).map((c) => html`<tr key=${c.address}><td>${nameOf(c.address)}</td><td>${c.open}</td>
        <td>${size(c.sent)}</td><td>${size(c.received)}</td></tr>`)}</tbody></table></div>`
    : html`<p class="quiet">${!flows.at ? 'not known yet' : f && f.open ? 'the nodes do not name the clients' : 'no connection is tracked now'}</p>`}
    ${points.length ? html`<${Line} points=${points} of="rate" what="connections" /><${Line} points=${points} of="errors" what="refused and dropped packets" bad />` : ''}`;
}
