// The page: log in, then three views and the explanation of one Service beside them.
import { html, render, useState, useEffect } from './preact-htm.js';
import { ask, setToken } from './api.js';
import { state, subscribe, isService } from './model.js';
import { begin } from './store.js';
import { Overview } from './overview.js';
import { Map_ } from './map.js';
import { Changes } from './changes.js';
import { Detail } from './detail.js';

const views = [['wrong', 'What is wrong'], ['map', 'Map'], ['changes', 'What changed']];

// namespaceOf guesses the namespace of a ServiceAccount from its token; the server judges the token.
function namespaceOf(token) {
  try {
    const body = JSON.parse(atob(token.split('.')[1].replace(/-/g, '+').replace(/_/g, '/')));
    return (body['kubernetes.io'] || {}).namespace || '';
  } catch { return ''; }
}

// login tries a token: for all namespaces, and if the user may not read these, for one.
async function login(token, namespace) {
  setToken(token);
  const path = (ns) => `/api/v1/${ns ? `namespaces/${ns}/` : ''}services`;
  try {
    await ask(path(namespace), [['limit', '1']]);
    return namespace;
  } catch (e) {
    const own = namespaceOf(token);
    if (e.code === 403 && !namespace && own) {
      try {
        await ask(path(own), [['limit', '1']]);
        return own;
      } catch { /* the first answer says more */ }
    }
    setToken('');
    if (e.code === 401) {
      throw new Error('the server does not accept this token, and the browser has sent no client certificate that it accepts: ' + e.message);
    }
    if (e.code === 403 && !namespace) throw new Error('this user may not read the Services of all namespaces: name one. ' + e.message);
    throw e;
  }
}

// whenEnded says what to do when the server no longer accepts the user: of a token, and of the link of 'fairlead ui'.
const whenEnded = ['the server no longer accepts this login: the token has ended. Log out and in again',
  "the server no longer accepts the credentials of the kubeconfig, or 'fairlead ui' has ended: start it again"];

// Login asks for a token and a namespace; with the secret of a link only for the namespace.
function Login({ enter, secret, namespace, failed }) {
  const [trouble, setTrouble] = useState(failed);
  const [busy, setBusy] = useState(false);
  const submit = async (e) => {
    e.preventDefault();
    const form = new FormData(e.target);
    setBusy(true);
    setTrouble('');
    try {
      enter(await login(secret || form.get('token').trim(), form.get('namespace').trim()));
    } catch (x) {
      setTrouble(x.message);
      setBusy(false);
    }
  };
  return html`<main class="login"><h1>fairlead</h1>
    ${secret ? html`<p>The page shows what the rights of the kubeconfig allow.</p>`
    : html`<p>Log in with a bearer token, or without one if the browser has a client certificate of the cluster. The page shows what the
      rights of that user allow.</p>`}
    <form onSubmit=${submit}>
      ${secret ? '' : html`<label>Token <input name="token" id="token" type="password" autocomplete="off" spellcheck="false" /></label>
      <p class="quiet"><code>kubectl create token NAME</code> prints one. It stays in the memory of this page.</p>`}
      <label>Namespace <input name="namespace" id="namespace" autocomplete="off" spellcheck="false" placeholder="all"
        defaultValue=${namespace} /></label>
      <button type="submit" disabled=${busy}>${secret ? 'Try again' : 'Log in'}</button>
      <p role="alert" class="trouble">${trouble}</p>
    </form></main>`;
}

// place reads the view and the question from the address: #/VIEW, #/VIEW/NAMESPACE/NAME for a Service, or #/VIEW/=/QUESTION. What has
// more parts is asked as it is: the server says what is wrong with it.
function place() {
  const [, view, ...parts] = location.hash.split('/');
  let of = '';
  try {
    if (parts.length > 1 && parts.every(Boolean)) of = parts.slice(parts[0] === '=' ? 1 : 0).map(decodeURIComponent).join('/');
  } catch { /* no text in UTF-8, so no name */ }
  return { view: views.some(([v]) => v === view) ? view : 'wrong', of };
}

// Ask takes a question as 'fairlead explain' does: a Service, a DNS name, or an address with a port.
function Ask({ open }) {
  const submit = (e) => {
    e.preventDefault();
    const text = e.target.elements.question.value.trim();
    if (text) open(/[/.:]/.test(text) ? text : (state.namespace || 'default') + '/' + text);
  };
  return html`<form class="ask" role="search" aria-label="Explain" onSubmit=${submit}>
    <label>Explain <input name="question" id="question" autocomplete="off" spellcheck="false" maxlength="300"
      placeholder="Service, name or ADDRESS:PORT" /></label> <button type="submit">Ask</button></form>`;
}

function Shell({ secret }) {
  const [, again] = useState(0);
  const [at, setAt] = useState(place());
  useEffect(() => {
    const move = () => setAt(place());
    addEventListener('hashchange', move);
    const stop = subscribe(() => again((n) => n + 1));
    return () => { removeEventListener('hashchange', move); stop(); };
  }, []);
  const open = (of) => { location.hash = `#/${at.view}/${isService(of) ? of.split('/').map(encodeURIComponent).join('/') : '=/' + encodeURIComponent(of)}`; };
  const close = () => {
    location.hash = `#/${at.view}`;
    setTimeout(() => { const b = document.querySelector('main'); if (b) b.focus(); }, 0);
  };
  const trouble = [...state.trouble.values()];
  return html`<header class="top"><h1>fairlead</h1>
    <nav aria-label="Views">${views.map(([v, title]) => html`<a key=${v} href=${'#/' + v} aria-current=${v === at.view ? 'page' : null}>${title}</a>`)}</nav>
    <${Ask} open=${open} />
    <span class="quiet">${state.namespace ? 'namespace ' + state.namespace : 'all namespaces'}</span>
    ${secret ? '' : html`<button onClick=${() => { history.replaceState(null, '', location.pathname); location.reload(); }}>Log out</button>`}</header>
    ${trouble.length ? html`<p class="trouble bar" role="status">${trouble.join(' · ')}</p>` : ''}
    <div class=${'body' + (at.of ? ' split' : '')}><main tabindex="-1">
      ${at.view === 'wrong' ? html`<${Overview} open=${open} />` : ''}
      ${at.view === 'map' ? html`<${Map_} open=${open} selected=${at.of} />` : ''}
      ${at.view === 'changes' ? html`<h2>What changed</h2><${Changes} of="" open=${open} />` : ''}
    </main>${at.of ? html`<${Detail} of=${at.of} open=${open} close=${close} />` : ''}</div>`;
}

function App({ secret, namespace, failed, logged }) {
  const [inside, setInside] = useState(logged);
  const enter = (of) => { begin(of, whenEnded[secret ? 1 : 0]); setInside(true); };
  useEffect(() => { if (logged) enter(namespace); }, []);
  return inside ? html`<${Shell} secret=${secret} />` : html`<${Login} enter=${enter} secret=${secret} namespace=${namespace} failed=${failed} />`;
}

// 'fairlead ui' opens the page with a fragment, which no server sees: a key, which does not stay in the history, and a namespace.
async function start() {
  const link = new URLSearchParams(location.hash.slice(1));
  const secret = (/^[A-Z2-7]+$/.exec(link.get('key')) || [''])[0]; // as 'fairlead ui' makes them: a link gives nobody's token
  let namespace = link.get('namespace') || '';
  let failed = '';
  if (secret || namespace) history.replaceState(null, '', location.pathname);
  if (secret) {
    try {
      namespace = await login(secret, namespace);
    } catch (e) { failed = e.message; }
  }
  const at = document.getElementById('app');
  at.replaceChildren(); // preact would leave parts of what stood there before
  render(html`<${App} secret=${secret} namespace=${namespace} failed=${failed} logged=${!!secret && !failed} />`, at);
}

start();
