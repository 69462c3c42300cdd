// What changed within the last hour: writes of objects with their writer, endpoints, Events, and what nodes had.
import { html, useState, useEffect } from './preact-htm.js';
import { state } from './model.js';
import { readEvents, history, hour } from './store.js';

export const clock = (t) => new Date(t).toLocaleTimeString([], { hour12: false });

function Line({ c, open }) {
  return html`<li class=${c.bad ? 'bad' : ''}><time datetime=${new Date(c.at).toISOString()}>${clock(c.at)}</time>
    <span class="kind">${c.kind}</span>
    <span>${c.service && open ? html`<button class="link" onClick=${() => open(c.service)}>${c.service}</button> ` : ''}${c.what}${
  c.who ? html` <span class="quiet">by ${c.who}</span>` : ''}</span></li>`;
}

// lost and won are the lines of a node's state that went and came.
function difference(before, after) {
  const was = before.trim().split('\n');
  const is = after.trim().split('\n');
  return [...was.filter((l) => l && !is.includes(l)).map((l) => '− ' + l.trim()), ...is.filter((l) => l && !was.includes(l)).map((l) => '+ ' + l.trim())];
}

const maxShown = 300;
const again = 10000; // ms between the end of one read and the next

// Changes is the time line of one Service, or of everything.
export function Changes({ of, open }) {
  const [events, setEvents] = useState([]);
  const [nodes, setNodes] = useState([]);
  const [trouble, setTrouble] = useState({}); // of the Events and of the nodes: each is cleared by its own success
  const [search, setSearch] = useState('');
  useEffect(() => {
    const gone = new AbortController();
    let timer = 0;
    const say = (what, text) => { if (!gone.signal.aborted) setTrouble((t) => ({ ...t, [what]: text })); };
    const readNodes = async () => {
      try {
        const { value } = await history(of, gone.signal);
        setNodes(value.changes.map((c) => ({ at: Date.parse(c.time), service: of, kind: 'node ' + c.node, who: '',
          what: difference(c.before || '', c.after || '').join('; ') })));
        const left = value.notAsked ? [value.notAsked + ' more nodes were not asked'] : [];
        say('nodes', [...(value.problems || []), ...left].join('; '));
      } catch (e) { say('nodes', 'cannot read what nodes had: ' + e.message); }
    };
    const readAll = async () => {
      try {
        const { list, more } = await readEvents(of, gone.signal);
        setEvents(list);
        say('events', more ? `there are more than ${list.length} Events of the last hour: some are not shown` : '');
      } catch (e) { say('events', 'cannot read Events: ' + e.message); }
    };
    const read = async () => {
      if (!document.hidden) await Promise.all([readAll(), of ? readNodes() : null]);
      if (!gone.signal.aborted) timer = setTimeout(read, again);
    };
    setEvents([]);
    setNodes([]);
    read();
    return () => { gone.abort(); clearTimeout(timer); };
  }, [of]);
  const words = search.toLowerCase().split(/\s+/).filter(Boolean);
  const now = Date.now();
  const all = [...state.changes, ...events, ...nodes]
    .filter((c) => now - c.at < hour && (!of || c.service === of) && words.every((w) => (c.service + ' ' + c.what + ' ' + c.who + ' ' + c.kind).toLowerCase().includes(w)))
    .sort((a, b) => b.at - a.at);
  const list = all.slice(0, maxShown);
  const problems = [trouble.events, trouble.nodes].filter(Boolean);
  return html`<section class="changes" aria-label="What changed">
    ${of ? '' : html`<div class="tools"><label>Search <input type="search" value=${search} onInput=${(e) => setSearch(e.target.value)} /></label>
      <span class="quiet" role="status">${all.length} changes of the last hour${
    all.length > maxShown ? `, of which the last ${maxShown} are shown` : ''}</span></div>`}
    ${problems.map((p) => html`<p key=${p} class="trouble">${p}</p>`)}
    ${list.length ? html`<ol class="line">${list.map((c, i) => html`<${Line} key=${c.at + c.kind + c.what + i} c=${c} open=${of ? null : open} />`)}</ol>`
    : html`<p class="quiet">nothing in the last hour</p>`}
  </section>`;
}
