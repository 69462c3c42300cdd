// One question: what becomes of a connection to a Service, a name or an address, node by node, as 'fairlead explain' says it; and what
// changed for the Service.
import { html, useState, useEffect, useRef } from './preact-htm.js';
import { state, isService, levelOf, rowFor, stampOf } from './model.js';
import { explain } from './store.js';
import { Changes, clock } from './changes.js';
import { Traffic } from './flows.js';

const Lines = ({ list }) => html`<ul class="lines">${(list || []).map((l, i) => html`<li key=${i}>${l.text} <span class="source">[${l.source}]</span></li>`)}</ul>`;

function Frontend({ f }) {
  return html`<div class="frontend"><h3>${f.kind} ${f.protocol} ${f.address}: <span class=${'answer ' + levelOf(f.answer)}>${f.answer}${
    f.cause ? ', ' + f.cause : ''}</span></h3>
    <${Lines} list=${f.lines} />
    ${f.proof && f.proof.length ? html`<details><summary>read back from the node (${f.proof.length})</summary><${Lines} list=${f.proof} /></details>` : ''}</div>`;
}

// announcedBy says who announces an address, as 'fairlead explain' does.
function announcedBy(a) {
  if (!a.announcers.length) return a.nobody ? 'no node announces it' : 'who announces it is not known';
  return 'announced by ' + a.announcers.map((n) => `node ${n.node} (${n.via}${n.interface ? ' on ' + n.interface : ''})`).join(', ');
}

const Balancers = ({ list }) => (list || []).map((b) => html`<div key=${b.service} class="verdict balancer">
  <h3>load balancer of Service ${b.service}, ${b.way} way</h3><${Lines} list=${b.lines} />
  ${(b.addresses || []).map((a) => html`<h4 key=${a.address}>${a.address}: <span class=${'answer ' + (a.announcers.length ? 'good' : a.nobody ? 'bad' : '')}>${
  announcedBy(a)}</span></h4><${Lines} list=${a.lines} />`)}</div>`);

const maxShown = 100;

function Endpoints({ list }) {
  return html`<div class="wide" tabindex="0" role="region" aria-label="Endpoints"><table><caption class="unseen">Endpoints</caption>
    <thead><tr><th>endpoint</th><th>Pod</th><th>node</th><th>connections</th><th>why</th></tr></thead>
    <tbody>${list.slice(0, maxShown).map((e) => html`<tr key=${e.address}><td>${e.address}</td><td>${e.pod || '-'}</td><td>${e.node || '-'}</td>
      <td>${e.may ? 'yes' : 'no'}</td><td><${Lines} list=${e.why} /></td></tr>`)}
      ${list.length > maxShown ? html`<tr><td colspan="5">${list.length - maxShown} more</td></tr>` : ''}</tbody></table></div>`;
}

function Verdict({ v, first }) {
  return html`<details open=${first} class="verdict"><summary>${v.node ? 'node ' + v.node : 'any node'}: <span class=${'answer ' + levelOf(v.answer)}>${
    v.answer}${v.cause ? ', ' + v.cause : ''}</span>${v.mode ? html` <span class="quiet">mode ${v.mode}</span>` : ''}</summary>
    ${v.remedy ? html`<p class="remedy"><b>What to do:</b> ${v.remedy}</p>` : ''}
    <${Lines} list=${v.lines} />
    ${(v.frontends || []).map((f, i) => html`<${Frontend} key=${i} f=${f} />`)}
    ${v.endpoints && v.endpoints.length ? html`<${Endpoints} list=${v.endpoints} />` : ''}</details>`;
}

// judgement is what the map knows of a Service, or, of another question, what the answer says.
function judgement(of, answer) {
  if (isService(of)) {
    const row = rowFor(of);
    return row ? row.j : { level: 'none', answer: 'there is no such Service', cause: '', why: '' };
  }
  const f = answer && answer.value.finding;
  if (!f) return { level: 'wait', answer: answer ? 'not known' : 'not asked yet', cause: '', why: '' };
  return { level: levelOf(f.answer), answer: f.answer, cause: f.cause || '', why: f.text || '', source: f.source };
}

export function Detail({ of, open, close }) {
  const [from, setFrom] = useState('');
  const [node, setNode] = useState('');
  const [answer, setAnswer] = useState(null);
  const [trouble, setTrouble] = useState('');
  const [busy, setBusy] = useState(false);
  const head = useRef(null);
  const asked = useRef(null); // the question that is being asked, to abort it
  const service = isService(of) ? of : ((answer && answer.value.verdicts[0]) || {}).service || '';
  const known = () => (state.judged && isService(of) ? stampOf(of) : ''); // before that, the lists may not be there
  const put = (e) => {
    if (e) e.preventDefault();
    if (asked.current) asked.current.abort();
    const question = new AbortController();
    asked.current = question;
    const at = Date.now();
    const stamp = known();
    const answered = (a) => setAnswer({ ...a, at, stamp: stamp || known() });
    setBusy(true);
    setTrouble('');
    explain(of, from.trim(), node, question.signal).then((a) => { if (!question.signal.aborted) { answered(a); setBusy(false); } },
      (x) => { if (!question.signal.aborted) { setTrouble(x.message); setBusy(false); } });
  };
  useEffect(() => { setAnswer(null); put(); head.current.focus(); return () => asked.current.abort(); }, [of]);
  const j = judgement(of, answer);
  const old = answer && !busy && answer.stamp && answer.stamp !== stampOf(of);
  return html`<aside class="detail" aria-label=${(isService(of) ? 'Service ' : 'Question ') + of} onKeyDown=${(e) => { if (e.key === 'Escape') close(); }}>
    <header><h2 tabindex="-1" ref=${head}>${of}</h2><button onClick=${close} aria-label="close the explanation">Close</button></header>
    <p class=${'headline ' + j.level}><b>${j.answer}${j.cause ? ', ' + j.cause : ''}</b>${j.why ? ': ' + j.why : ''}</p>
    ${j.source ? html`<p class="source">[${j.source}]</p>` : ''}
    ${service && service !== of ? html`<p>It leads to Service <button class="link" onClick=${() => open(service)}>${service}</button>.</p>` : ''}
    <form class="tools" onSubmit=${put}>
      <label>from <input value=${from} placeholder="any client, or a Pod, Node, IP" onInput=${(e) => setFrom(e.target.value)} /></label>
      <label>on <select value=${node} onChange=${(e) => setNode(e.target.value)}><option value="">all nodes</option>
        ${[...state.nodes.keys()].sort().map((n) => html`<option key=${n} value=${n}>${n}</option>`)}</select></label>
      <button type="submit">Explain</button></form>
    <div aria-live="polite" aria-busy=${busy}>
      ${trouble ? html`<p class="trouble">${trouble}</p>` : ''}
      ${busy ? html`<p class="quiet">asking the nodes …</p>` : ''}
      ${answer ? html`<p class=${old ? 'trouble' : 'quiet'}>asked at ${clock(answer.at)}${old ? '; the Service has changed since' : ''}
        ${old ? html` <button onClick=${put}>Ask again</button>` : ''}</p>
        ${answer.value.verdicts.map((v, i) => html`<${Verdict} key=${v.node} v=${v} first=${i === 0} />`)}
        <${Balancers} list=${answer.value.balancers} />
        ${answer.value.notAsked ? html`<p>${answer.value.notAsked} more nodes were not asked: choose one.</p>` : ''}
        <details><summary>as JSON</summary><pre id="explain-json" tabindex="0">${answer.text}</pre></details>` : ''}
    </div>
    ${service ? html`<${Traffic} of=${service} /><h3>What changed</h3><${Changes} of=${service} />` : ''}
  </aside>`;
}
