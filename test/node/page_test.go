package node

import (
	"bufio"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net/netip"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

var pictures = flag.String("pictures", "", "a directory to write pictures of the page to, for README and docs")

// hostileEvent has HTML in what a tenant may write.
const hostileEvent = `
apiVersion: v1
kind: Event
metadata: {name: hostile, namespace: default}
involvedObject: {apiVersion: v1, kind: Service, namespace: default, name: typo}
reason: Hostile
type: Normal
message: "<img src=x onerror=throw(1)>"
`

// browser is a Chromium on a host, driven by test/browser.
type browser struct {
	t   *testing.T
	in  io.Writer
	out *bufio.Reader
}

func newBrowser(t *testing.T, cmd *exec.Cmd) *browser {
	t.Helper()
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	var log strings.Builder
	cmd.Stderr, cmd.WaitDelay = &log, testbed.Patience // a process of Chromium may keep it open
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = in.Close() // it ends with its input
		late := time.AfterFunc(testbed.Patience, func() { _ = cmd.Process.Kill() })
		defer late.Stop()
		if err := cmd.Wait(); err != nil || t.Failed() {
			t.Logf("the browser: %v\n%s", err, log.String())
		}
	})
	return &browser{t, in, bufio.NewReader(out)}
}

// do is one request of test/browser: a field and its value, for as many fields as it needs.
func (b *browser) do(fields ...string) json.RawMessage {
	b.t.Helper()
	request := map[string]any{}
	for i := 0; i < len(fields); i += 2 {
		request[fields[i]] = fields[i+1]
		if fields[i] == "seen" || fields[i] == "heap" {
			request[fields[i]] = true
		}
	}
	text, err := json.Marshal(request)
	if err == nil {
		_, err = b.in.Write(append(text, '\n'))
	}
	if err != nil {
		b.t.Fatal(err)
	}
	line, err := b.out.ReadBytes('\n')
	var answer struct {
		Value json.RawMessage
		Error string
	}
	if err == nil {
		err = json.Unmarshal(line, &answer)
	}
	if err != nil || answer.Error != "" {
		what := b.text()
		b.t.Fatalf("browser %s: %v %s\nthe page says\n%s", text, err, answer.Error, what)
	}
	return answer.Value
}

// text is what the page shows, for a test that fails.
func (b *browser) text() string {
	_, _ = io.WriteString(b.in, `{"eval":"document.body.innerText"}`+"\n")
	line, _ := b.out.ReadString('\n')
	return strings.ReplaceAll(line, `\n`, "\n")
}

// shows waits until an element that a selector finds has all texts.
func (b *browser) shows(selector string, texts ...string) {
	b.t.Helper()
	b.do("wait", fmt.Sprintf("[...document.querySelectorAll(%q)].some(e => %s.every(t => e.innerText.includes(t)))", selector, quoted(texts)))
}

func quoted(texts []string) string {
	out, _ := json.Marshal(texts) // strings
	return string(out)
}

// accessible finds what axe-core objects to, in both themes.
func (b *browser) accessible(view string) {
	b.t.Helper()
	for _, theme := range []string{"light", "dark"} {
		b.do("theme", theme)
		if *pictures != "" {
			b.do("picture", filepath.Join(*pictures, "page-"+view+"-"+theme+".png"))
		}
		found := b.do("eval", `axe.run().then(r => r.violations.map(v =>
			v.id + ': ' + v.nodes.map(n => n.target + ' ' + n.failureSummary).join('; ')))`)
		if string(found) != "[]" {
			b.t.Errorf("view %s, theme %s: %s", view, theme, found)
		}
	}
}

func (b *browser) login(token string) {
	b.t.Helper()
	b.do("wait", "document.querySelector('#token')")
	b.do("into", "#token", "text", token)
	b.do("click", "button[type=submit]")
}

// page drives the page of the server: what is wrong, the map, an explanation, and a change, as an administrator and as a user of one
// namespace. The Services of stories are there.
func (c *cluster) page() {
	c.t.Helper()
	c.kubectl("create", "serviceaccount", "page")
	c.kubectl("create", "clusterrolebinding", "page", "--clusterrole=cluster-admin", "--serviceaccount=default:page")
	token := strings.TrimSpace(c.kubectl("create", "token", "page"))
	at := c.api.Config.Host + "/ui"
	program := process.Build(c.t, "test/browser", ".")
	b := newBrowser(c.t, c.on(c.server, program))
	open := c.hold(netip.MustParseAddrPort(c.frontend("my-service")))
	defer open.Close()
	b.do("open", at)
	axe, err := filepath.Abs("../browser/testdata/axe.min.js")
	if err != nil {
		c.t.Fatal(err)
	}
	b.do("script", axe)
	b.do("wait", "document.querySelector('#token')")
	b.accessible("login")
	b.login(token)

	b.shows(".wrong li.bad", "default/typo", "refused, NoEndpoint", "no Pod has the labels app=myapp", "What to do:")
	b.shows(".wrong li", "port 80 leads to port 8080, which none of its Pods has")
	b.shows("table", c.node.Name(), "nft")
	b.accessible("wrong")

	b.do("click", `nav a[href="#/map"]`)
	b.accessible("map")
	b.do("into", "#search", "text", "default/typo")
	b.shows(".row.bad", "default/typo", "refused, NoEndpoint", "no Pod has the labels app=myapp")
	b.do("wait", "document.querySelectorAll('.row.bad').length === 1")
	b.do("click", ".row.bad button")
	testbed.Until(c.t, "the page's explanation to be that of the command", func() error {
		b.do("wait", "document.querySelector('#explain-json') && document.querySelector('[aria-busy=false]')")
		var shown string
		if err := json.Unmarshal(b.do("eval", "document.querySelector('#explain-json').textContent"), &shown); err != nil {
			return err
		}
		said := process.Output(c.t, c.fairlead(c.server, "explain", "default/typo", "-o", "json"))
		var has, want any
		if err := json.Unmarshal([]byte(shown), &has); err != nil {
			return err
		}
		if err := json.Unmarshal([]byte(said), &want); err != nil {
			return err
		}
		if !reflect.DeepEqual(has, want) {
			b.do("click", ".detail form button")
			return fmt.Errorf("the page has\n%s\nthe command\n%s", shown, said)
		}
		return nil
	})
	b.shows(".detail", "What changed", "wrote spec", "by kubectl-client-side-apply")
	b.shows(".detail", "asked at ")
	c.kubectl("annotate", "service", "typo", "example.com/changed=yes")
	b.shows(".detail", "; the Service has changed since")
	b.do("eval", "[...document.querySelectorAll('.detail button')].find(e => e.innerText === 'Ask again').click()")
	b.do("wait", "!document.querySelector('.detail').innerText.includes('has changed since')")
	b.accessible("explain")
	c.causes(b)
	c.questions(b)
	c.lists(b)
	c.asks(b)

	b.do("eval", "location.hash = '#/map'")
	b.do("into", "#search", "text", "default/late")
	b.shows("[role=status]", "0 of ")
	c.kubectl("create", "service", "clusterip", "late", "--tcp=80:9376")
	begin := time.Now()
	b.shows(".row.bad", "default/late", "NoEndpoint")
	c.t.Logf("a new Service was judged on the page %s after kubectl ended", time.Since(begin))
	c.kubectl("patch", "service", "late", "-p", `{"spec":{"selector":{"app":"MyApp"}}}`)
	b.shows(".row.good", "default/late", "2 of 2 ready")
	c.apply(hostileEvent)
	b.do("eval", "location.hash = '#/changes'")
	b.shows(".line li", "default/late", "created", "by kubectl-create")
	b.shows(".line li", "default/late", "wrote spec.selector", "by kubectl-patch")
	b.shows(".line li", "default/late", "endpoint added", "by fairlead")
	b.shows(".line li", "Hostile: <img src=x onerror=throw(1)>")
	b.do("eval", "location.hash = '#/map/default/typo'")
	b.shows(".detail .line li", "Hostile: <img src=x onerror=throw(1)>")
	b.do("eval", "location.hash = '#/map/default/%'")
	b.do("into", "#search", "text", "default/late") // only the rows in sight are in the document
	b.shows(".map", "default/late")
	b.do("eval", "location.hash = '#/changes'")
	b.accessible("changes")
	c.loses(b)
	c.manyServices(b)
	c.measures(b)
	c.manyPages(token)
	c.seen(b)
	c.zoomed(b)
	c.still(b)
	c.keyboard(b, token)

	c.paints(b, at+"/")
	c.forgets(b, token)
	b.do("open", at)
	b.login("not-a-token")
	b.shows("[role=alert]", "does not accept this token")
	c.tenant(b)
	c.loopback(b)
}

// loopback is the page that 'fairlead ui' serves itself: its link needs no login, and the address does not keep the key.
func (c *cluster) loopback(b *browser) {
	c.t.Helper()
	if out := process.Output(c.t, c.fairlead(c.server, "ui", "--no-browser")); !strings.HasPrefix(out, c.api.Config.Host+"/ui\n") {
		c.t.Errorf("fairlead ui prints %s", out)
	}
	serving := process.Start(c.t, c.fairlead(c.server, "ui", "--loopback", "--no-browser"))
	b.do("open", serving.Says(`http://127\.0\.0\.1:\d+/ui/#key=\w+`)[0])
	b.shows(".wrong li.bad", "default/typo", "refused, NoEndpoint")
	if at := string(b.do("eval", "location.href")); strings.Contains(at, "key") {
		c.t.Errorf("the address has the key: %s", at)
	}
	b.do("open", "about:blank")
	serving.Stop()
}

// loopbackOf is that page with the kubeconfig of a user whose rights end at a namespace, which the kubeconfig or a flag names.
func (c *cluster) loopbackOf(b *browser, token string) {
	c.t.Helper()
	for namespace, shows := range map[string][]string{
		"shop":    {".wrong li.bad", "shop/cart", "refused, NoEndpoint"},
		"default": {"[role=alert]", "cannot list resource"},
	} {
		kubeconfig := filepath.Join(c.dir, "kubeconfig-"+namespace)
		for _, args := range [][]string{
			{"set-cluster", "c", "--server", c.api.Config.Host, "--insecure-skip-tls-verify"}, {"set-credentials", "u", "--token", token},
			{"set-context", "c", "--cluster=c", "--user=u", "--namespace", namespace}, {"use-context", "c"},
		} {
			process.Output(c.t, c.on(c.server, process.Program("kubectl"), append([]string{"config", "--kubeconfig", kubeconfig}, args...)...))
		}
		serving := process.Start(c.t, c.fairlead(c.server, "ui", "--loopback", "--no-browser", "--kubeconfig", kubeconfig))
		link := serving.Says(`http://127\.0\.0\.1:\d+/ui/#key=\w+&namespace=` + namespace)[0]
		b.do("open", link)
		b.shows(shows[0], shows[1:]...)
		if namespace == "default" { // the key is kept: the user names the namespace
			b.do("into", "#namespace", "text", "shop")
			b.do("click", "button[type=submit]")
			b.shows(".wrong li.bad", "shop/cart", "refused, NoEndpoint")
		}
		b.do("open", "about:blank")
		serving.Stop()
	}
}

// backsOff follows, for a second, what forgets each version at once, and what ends each watch at once, and counts the watches of both.
const backsOff = `import('/ui/api.js').then(async ({ follow }) => {
	const real = window.fetch;
	const watches = [0, 0];
	window.fetch = (path, options) => {
		const i = ['/gone', '/empty'].findIndex((p) => String(path).startsWith(p));
		if (i < 0) return real(path, options);
		let text = '{"items":[],"metadata":{"resourceVersion":"1"}}';
		if (path.includes('watch=1')) {
			watches[i]++;
			text = i ? '' : '{"type":"ERROR","object":{"code":410,"message":"too old"}}\n';
		}
		return new Promise((done) => setTimeout(() => done(new Response(text)), 0));
	};
	const end = new AbortController();
	setTimeout(() => end.abort(), 1000);
	const on = { reset() {}, one() {}, state() {} };
	await Promise.all(['/gone', '/empty'].map((p) => follow(p, on, end.signal)));
	window.fetch = real;
	return watches;
})`

// readsLong lists 5,000 objects where the server cuts them down, where it does not know how, and where it fails: what is read, who
// wrote the first one, the version that is watched from, and how many requests of the list that took.
const readsLong = `import('/ui/api.js').then(async ({ follow }) => {
	const real = window.fetch;
	const out = [];
	try {
		for (const code of [200, 404, 500]) {
			let lists = 0;
			let version = '';
			let read = [];
			const end = new AbortController();
			setTimeout(() => end.abort(), 10e3);
			window.fetch = async (path, options) => {
				const url = new URL(path, location);
				if (url.search === '?kind=long&namespace=shop') {
					return new Response('{"items":[{"metadata":{"writes":[[2,0]]}}],"writes":[{"who":"me"}],"resourceVersion":"7"}', { status: code });
				}
				if (url.pathname !== '/long') return real(path, options);
				if (url.searchParams.get('watch')) {
					version = url.searchParams.get('resourceVersion');
					end.abort();
					return new Response('');
				}
				lists++;
				const from = Number(url.searchParams.get('continue'));
				const to = Math.min(5000, from + Number(url.searchParams.get('limit')));
				return new Response(JSON.stringify({ items: Array(to - from).fill({ metadata: { written: [] } }),
					metadata: { resourceVersion: '1', continue: to < 5000 ? String(to) : '' } }));
			};
			await follow('/long', { reset: (items) => { read = items; }, one() {}, state() {}, read: (o) => o, short: ['long', 'shop'] },
				end.signal);
			out.push([read.length, ...read[0].metadata.written.map((w) => w.at + w.who), version, lists].join(' '));
		}
	} finally {
		window.fetch = real;
	}
	return out;
})`

// keepsRows changes Services, slices, findings and the report at random, and compares the rows and numbers that the page has kept with
// those that it makes of all Services.
const keepsRows = `import('/ui/model.js').then((m) => {
	const { state } = m;
	let seed = 1;
	const random = (n) => (seed = seed * 48271 % 2147483647) % n;
	const key = () => 'many/s' + random(40);
	const found = m.find('many 10.1.', true);
	const take = () => JSON.stringify([[m.all, m.wrong, m.concerned, found].map((l) =>
		l.list.map((r) => [r.key, r.rank, r.total, r.ready, r.lines])),
		Object.entries(m.numbers.kinds).filter(([, n]) => n).sort(), m.numbers.endpoints, m.numbers.ready, m.numbers.lines]);
	const like = state.services.get('many/s1');
	const real = state.report;
	let most = 0;
	for (let i = 0; i < 2000; i++) {
		const k = key();
		const name = k.slice(5);
		switch (random(6)) {
		case 0: m.setService(k, null); break;
		case 1: m.setService(k, { ...like, key: k, name, type: random(2) ? 'NodePort' : 'ClusterIP' }); break;
		case 2: m.setSlice({ id: k, name, version: '1', service: random(5) ? k : key(), family: random(2) ? 'IPv4' : 'IPv6',
			ports: [], writes: [],
			endpoints: [0, 1, 2].slice(random(3)).map((e) => ({ address: '10.1.0.' + e, ready: !random(2), pod: '', node: '' })) }, false); break;
		case 3: m.setSlice({ id: k, name, service: k }, true); break;
		case 4: m.setFindings(random(2) ? [{ service: k, answer: random(2) ? 'refused' : 'sometimes', cause: 'NoEndpoint', text: '' }] : [],
			[k]); break;
		default: m.setReport({ ...real, problems: ['x', k], serviceProblems: [{ service: k, text: k }, { service: k, text: 'y' }] });
		}
		most = Math.max(most, found.list.length);
		if (i % 100) continue;
		const kept = take();
		m.refreshAll();
		if (take() !== kept) return 'change ' + i + ': kept ' + kept.slice(0, 2000) + ' made ' + take().slice(0, 2000);
	}
	m.setReport(real);
	m.changed();
	return [...state.slices.values()].some((l) => !l.size) ? 'a Service without slices is kept' : most ? '' : 'the search finds none';
})`

// manyServices puts 10,000 Services into the page: only the rows in sight are in the document, and a search finds one.
func (c *cluster) manyServices(b *browser) {
	c.t.Helper()
	b.do("eval", `import('/ui/model.js').then(({ setService, changed }) => {
		for (let i = 0; i < 10000; i++) {
			const key = 'many/s' + i;
			setService(key, { key, version: '1', kind: 'Service', namespace: 'many', name: 's' + i, type: 'ClusterIP', ips: ['10.96.9.9'],
				external: [], alias: '', balancers: [], ports: [{ port: 80, protocol: 'TCP', node: 0, target: '80' }],
				selector: '', policy: '', writes: [], text: '' });
		}
		location.hash = '#/map';
		changed();
	})`)
	b.do("wait", "document.querySelector('.map [role=status]') && document.querySelector('.table').getAttribute('aria-rowcount') > 10000")
	b.do("eval", "document.querySelector('.box').scrollTop = 1e9")
	b.shows(".row", "many/s9999")
	if n := string(b.do("eval", "document.querySelectorAll('.row').length")); len(n) > 2 {
		c.t.Errorf("%s rows are in the document", n)
	}
	var watches []int
	if err := json.Unmarshal(b.do("eval", backsOff), &watches); err != nil || len(watches) != 2 || slices.Min(watches) < 1 ||
		slices.Max(watches) > 4 {
		c.t.Errorf("watches that end at once are begun %v times in a second: %v", watches, err)
	}
	if got, want := string(b.do("eval", readsLong)), `["1 2000me 7 1","5000 1 4","5000 1 4"]`; got != want {
		c.t.Errorf("long lists are read as %s, want %s", got, want)
	}
	if wrong := string(b.do("eval", keepsRows)); wrong != `""` {
		c.t.Errorf("after changes of single Services the page has other rows than those that it makes of all: %s", wrong)
	}
	b.do("into", "#search", "text", "many/s7777")
	b.shows("[role=status]", "1 of 10")
	b.shows(".row", "many/s7777")
}

// seen checks what the browser has seen of an administrator's visit.
func (c *cluster) seen(b *browser) {
	c.t.Helper()
	var seen struct {
		Hosts, Errors []string
		Bytes         map[string]int64
	}
	if err := json.Unmarshal(b.do("seen", ""), &seen); err != nil {
		c.t.Fatal(err)
	}
	if host := strings.TrimPrefix(c.api.Config.Host, "https://"); len(seen.Hosts) != 1 || seen.Hosts[0] != host {
		c.t.Errorf("requests went to %q, want only %s", seen.Hosts, host)
	}
	if len(seen.Errors) > 0 {
		c.t.Errorf("the console has %q", seen.Errors)
	}
	var sum int64
	for _, n := range seen.Bytes {
		sum += n
	}
	if len(seen.Bytes) < 8 || sum > 120<<10 {
		c.t.Errorf("%d bytes over the wire, of %v; want at most 120 KiB", sum, seen.Bytes)
	}
	c.t.Logf("the page is %d bytes over the wire", sum)
}

// tenant is a user with the role edit in one namespace: the page, and what it asks, show that namespace and nothing else.
func (c *cluster) tenant(b *browser) {
	c.t.Helper()
	c.kubectl("create", "namespace", "shop")
	c.kubectl("create", "-n", "shop", "service", "clusterip", "cart", "--tcp=80")
	c.kubectl("create", "-n", "shop", "serviceaccount", "tenant")
	c.kubectl("create", "-n", "shop", "rolebinding", "tenant", "--clusterrole=edit", "--serviceaccount=shop:tenant")
	token := strings.TrimSpace(c.kubectl("create", "-n", "shop", "token", "tenant"))
	b.do("open", "about:blank") // a change of the fragment loads nothing
	c.loopbackOf(b, token)
	b.do("open", c.api.Config.Host+"/ui/#/wrong")
	b.login(token)
	b.shows(".top", "namespace shop")
	b.shows(".wrong li.bad", "shop/cart", "refused, NoEndpoint")
	if text := string(b.do("eval", "document.body.innerText")); !strings.Contains(text, "shop/cart") || strings.Contains(text, "default/") {
		c.t.Errorf("a tenant sees another namespace:\n%s", text)
	}
	raw := func(path string) (string, error) {
		cmd := c.on(c.server, process.Program("kubectl"), "--server", c.api.Config.Host, "--insecure-skip-tls-verify", "--token", token,
			"--kubeconfig=/dev/null", "get", "--raw", path)
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	for _, path := range []string{
		"/fairlead/balancers", "/fairlead/balancers?namespace=default",
		"/fairlead/objects?kind=services", "/fairlead/objects?kind=endpointslices&namespace=default",
		"/fairlead/services", "/fairlead/services?namespace=default", "/fairlead/services?service=default/typo", "/fairlead/status",
		"/fairlead/status?namespace=default", "/fairlead/explain?question=default/typo", "/fairlead/certificates",
	} {
		if out, err := raw(path); err == nil || !strings.Contains(out, "orbidden") || strings.Contains(out, "NoEndpoint") {
			c.t.Errorf("a tenant gets %s: %v\n%s", path, err, out)
		}
	}
	if out, err := raw("/fairlead/history?service=default/typo"); strings.Contains(out, `"before"`) {
		c.t.Errorf("a tenant gets the history of another namespace: %v\n%s", err, out)
	}
	if out, err := raw("/fairlead/balancers?namespace=shop"); err != nil || !strings.Contains(out, `"problems"`) ||
		strings.Contains(out, "default") {
		c.t.Errorf("a tenant's load balancers: %v\n%s", err, out)
	}
	if out, err := raw("/fairlead/services?namespace=shop"); err != nil || !strings.Contains(out, "shop/cart") {
		c.t.Errorf("a tenant does not get its own Services: %v\n%s", err, out)
	}
	if out, err := raw("/fairlead/status?namespace=shop"); err != nil || !strings.Contains(out, "service shop/cart has no ready endpoint") ||
		strings.Contains(out, "default/") || strings.Contains(out, `"name": "`+c.node.Name()) {
		c.t.Errorf("a tenant's report: %v\n%s", err, out)
	}
	// Nodes answer only who may ask them.
	if out, err := raw("/fairlead/explain?question=cart&namespace=shop"); err != nil ||
		strings.Contains(out, `"proof"`) || !strings.Contains(out, "NoEndpoint") {
		c.t.Errorf("a tenant's explanation, which no node may answer: %v\n%s", err, out)
	}
	c.kubectl("delete", "-n", "shop", "serviceaccount", "tenant")
	b.shows(".trouble", "the token has ended. Log out and in again")
}
