package node

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/svc"
)

// keepsSeries gives the page answers of nodes, and compares what it makes of them: rates between answers of the same nodes, none over a
// gap or after a count that began again, and at most so many points and Services.
const keepsSeries = `Promise.all([import('/ui/flows.js'), import('/ui/model.js')]).then(([f, m]) => {
	const service = (name, connections, lost) => ({ namespace: 'many', service: name, connections, refusedPackets: lost, droppedPackets: 0,
		open: { connections: 2, sent: { bytes: 3 }, received: { bytes: 2048 } },
		clients: [{ address: '198.51.100.1', connections: 2, sent: { bytes: 3 }, received: { bytes: 2048 } }] });
	const at = (t, nodes, ...services) => f.take({ services, nodes, problems: [] }, t);
	const rates = (name) => f.seriesOf('many/' + name).map((p) => p.rate + '/' + p.errors).join(' ');
	const say = [];
	f.flows.at = 0;
	at(1000e3, ['a'], service('s101', 100, 5), service('s102', 1, 0));
	at(1010e3, ['a'], service('s101', 120, 5), service('s102', 1, 0));
	at(1020e3, ['a', 'b'], service('s101', 900, 5));
	at(1030e3, ['a', 'b'], service('s101', 910, 25));
	at(1200e3, ['a', 'b'], service('s101', 99999, 25));
	at(1210e3, ['a', 'b'], service('s101', 7, 0));
	at(1220e3, ['a', 'b'], service('s101', 7, 0));
	say.push(rates('s101'), rates('s102'), JSON.stringify(f.flows.by.get('many/s101').clients));
	for (let i = 1; i <= 500; i++) at(1220e3 + i * 10e3, ['a', 'b'], service('s101', 7 + i, 0));
	say.push(f.seriesOf('many/s101').length);
	const all = (n) => [...Array(700)].map((_, i) => service('s' + i, n, 0));
	at(9000e3, ['a'], ...all(1000));
	at(9010e3, ['a'], ...all(2000));
	say.push([...Array(700)].filter((_, i) => f.seriesOf('many/s' + i).length).length);
	const kept = m.state.services.get('many/s699');
	m.state.services.delete('many/s699');
	at(9020e3, ['a'], ...all(3000));
	say.push(f.seriesOf('many/s699').length);
	m.state.services.set('many/s699', kept);
	return say.join('|');
})`

// asks looks for who has a connection to a Service, on the map and beside the explanation.
func (c *cluster) asks(b *browser) {
	c.t.Helper()
	b.do("into", "#search", "text", "default/my-service")
	b.shows(".row .asks", " open", "node "+c.node.Name())
	b.do("eval", "location.hash = '#/map/default/my-service'")
	b.shows(".detail [aria-label=Clients]", "node "+c.node.Name()+" ("+c.node.Addr4().String()+")")
}

// measures draws what the page keeps of Services that are there in thousands, and measures frames while the list of Services scrolls, and
// while 200 of them change ten times a second. The figures depend on what else the machine does meanwhile: a page that hangs fails the
// test.
func (c *cluster) measures(b *browser) {
	c.t.Helper()
	var say string
	if err := json.Unmarshal(b.do("eval", keepsSeries), &say); err != nil ||
		say != `2/0 1/2 0/0||[{"address":"198.51.100.1","open":2,"sent":3,"received":2048}]|360|500|0` {
		c.t.Errorf("the page keeps %s, %v", say, err)
	}
	b.do("eval", "location.hash = '#/map/many/s600'")
	b.shows(".detail figure", "connections a second: now", "at most")
	b.accessible("traffic")
	b.do("eval", "location.hash = '#/map'")
	b.do("into", "#search", "text", "many/")
	const frames = `import('/ui/model.js').then(({ state, setService, changed }) => new Promise((done) => {
		const count = (each, draw, then) => {
			const begin = performance.now();
			let n = 0;
			let next = begin;
			const frame = (now) => {
				n++;
				draw();
				if (now >= next) { next = now + 100; each(); }
				if (now - begin < 3000) requestAnimationFrame(frame); else then(n / (now - begin) * 1000);
			};
			requestAnimationFrame(frame);
		};
		let round = 0;
		const change = () => {
			round++;
			for (let i = 0; i < 200; i++) {
				const s = state.services.get('many/s' + (1000 + i));
				setService(s.key, { ...s, version: String(round), type: round % 2 ? 'NodePort' : 'ClusterIP' });
			}
			changed();
		};
		const box = document.querySelector('.box');
		const scroll = () => { box.scrollTop = (box.scrollTop + 90) % (box.scrollHeight - box.clientHeight); };
		count(() => {}, () => {}, (idle) => count(() => {}, scroll, (scrolled) => {
			const down = box.scrollTop;
			count(change, () => {}, (busy) => done([idle, busy, round, scrolled, down]));
		}));
	}))`
	var got [5]float64
	if err := json.Unmarshal(b.do("eval", frames), &got); err != nil {
		c.t.Fatal(err)
	}
	c.t.Logf("%.0f frames a second while nothing changes, %.0f while the list scrolls, %.0f while 200 of 10,000 Services change %.0f times "+
		"in 3 s", got[0], got[3], got[1], got[2])
	if least := min(got[0]/4, 2); got[1] < least || got[3] < least || got[4] == 0 {
		c.t.Errorf("%.1f frames a second while Services change, %.1f while the list scrolls (now %.0f pixels down), %.1f while nothing happens",
			got[1], got[3], got[4], got[0])
	}
}

// firstPaint is how long the first paint of the page may take, with the request for it.
const firstPaint = 300 * time.Millisecond

// paints measures the first paint, which is of the head of the page before any script. A text of the same server, painted by the same
// browser, shows how much of it is of the machine. The page is opened until it is fast enough, a few times at most: others work here, too.
func (c *cluster) paints(b *browser, page string) {
	c.t.Helper()
	paint := func(at string) time.Duration {
		const entries = "performance.getEntriesByName('first-contentful-paint')"
		b.do("open", at)
		b.do("wait", entries+".length > 0")
		var ms float64
		if err := json.Unmarshal(b.do("eval", entries+"[0].startTime"), &ms); err != nil {
			c.t.Fatal(err)
		}
		return time.Duration(ms * float64(time.Millisecond)).Round(time.Millisecond)
	}
	least := time.Duration(math.MaxInt64)
	for range 20 {
		text, first := paint(page+"LICENSES.txt"), paint(page)
		c.t.Logf("the first paint was after %s, that of a text after %s", first, text)
		if least = min(least, first-text); first <= firstPaint {
			return
		}
	}
	if least > firstPaint {
		c.t.Errorf("the first paint was never within %s, and at best %s after that of a text", firstPaint, least)
	}
}

// churns has the watch of EndpointSlices bring changes that nobody made: of 1,000 Services, each with an endpoint of another Pod, now
// ready, now not, now gone.
const churns = `(() => {
	const real = window.fetch, text = new TextEncoder();
	window.fetch = async (path, options) => {
		const answer = await real(path, options);
		if (!path.includes('/endpointslices?watch=')) return answer;
		let version = +new URL(path, location.href).searchParams.get('resourceVersion'), n = 0;
		const body = answer.body.pipeThrough(new TransformStream({ start(to) {
			const one = () => {
				const i = n++, name = 's' + i % 1000;
				return JSON.stringify({ type: i % 10 === 9 ? 'DELETED' : 'MODIFIED', object: { metadata: { namespace: 'churn', name: name + '-x',
					resourceVersion: String(++version), labels: { 'kubernetes.io/service-name': name }, managedFields: [{ manager: 'm' + i % 7,
					operation: 'Update', time: new Date().toISOString(), fieldsV1: { 'f:endpoints': {}, 'f:metadata': { ['f:k' + i]: {} } } }] },
					addressType: 'IPv4', ports: [{ port: 80 }], endpoints: [{ addresses: ['10.9.' + (i >> 8 & 255) + '.' + (i & 255)],
					nodeName: 'n' + i, conditions: { ready: i % 3 > 0 }, targetRef: { kind: 'Pod', name: 'p' + i } }] } });
			};
			window.churn = async (changes) => {
				for (const end = n + changes; n < end;) {
					to.enqueue(text.encode(Array.from({ length: 100 }, one).join('\n') + '\n'));
					await new Promise((done) => setTimeout(done, 0));
				}
				return n;
			};
		} }));
		return new Response(body, { status: answer.status, headers: answer.headers });
	};
})()`

// An hour of 100 changes a second, of which the test makes a fifth, adds less than pageGrowth bytes to the page: less than a tenth
// of these in the second half of the test.
const (
	pageChanges = 72_000
	pageGrowth  = 10 << 20
)

// forgets logs in, and has more change than the page may keep.
func (c *cluster) forgets(b *browser, token string) {
	c.t.Helper()
	b.do("eval", churns)
	b.login(token)
	b.do("wait", "window.churn")
	heap := func() (n int) {
		c.t.Helper()
		if err := json.Unmarshal(b.do("heap", ""), &n); err != nil {
			c.t.Fatal(err)
		}
		return n
	}
	churn := func(changes int) {
		c.t.Helper()
		b.do("eval", "location.hash = '#/map'")
		b.do("eval", fmt.Sprintf("window.churn(%d)", changes/2))
		b.do("eval", "location.hash = '#/changes'")
		b.do("eval", fmt.Sprintf("window.churn(%d)", changes/2))
		b.shows(".line li", "churn/s", "endpoint")
	}
	churn(2000) // each of the 1,000 Services is known
	first := heap()
	churn(pageChanges / 2)
	middle := heap()
	churn(pageChanges / 2)
	last := heap()
	c.t.Logf("the page has %d KB, %d KB more after %d changes, and %d KB more after as many again", first>>10, (middle-first)>>10,
		pageChanges/2, (last-middle)>>10)
	if last-first > pageGrowth || last-middle > pageGrowth/10 {
		c.t.Errorf("the page grows: it had %d, %d and %d bytes", first, middle, last)
	}
}

// pages is how many pages are open, and pagesFor how long they are measured.
const (
	pages    = 50
	pagesFor = 12 * time.Second
)

// manyPages makes the requests of pages, beside each other, and measures the processor time of the server: once the lists are read, a page
// costs what changes, and the questions about connections, which all pages of a user share.
func (c *cluster) manyPages(token string) {
	c.t.Helper()
	ctx, stop := context.WithCancel(c.t.Context())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer stop()
	before := c.serverTime()
	time.Sleep(pagesFor / 4)
	idle := (c.serverTime() - before) * 4
	dial := func(ctx context.Context, _, to string) (net.Conn, error) {
		at, err := netip.ParseAddrPort(to)
		if err != nil {
			return nil, err
		}
		return c.server.Dial(ctx, svc.TCP, at)
	}
	client := &http.Client{Transport: &http.Transport{
		TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, //nolint:gosec // the server of the test
		DialContext:     dial, ForceAttemptHTTP2: true,
	}}
	get := func(path string) (*http.Response, error) {
		q, err := http.NewRequestWithContext(ctx, http.MethodGet, c.api.Config.Host+path, http.NoBody)
		if err != nil {
			return nil, err
		}
		q.Header.Set("Authorization", "Bearer "+token)
		q.Header.Set("Accept", "application/json")
		answer, err := client.Do(q)
		if err == nil && answer.StatusCode != http.StatusOK {
			answer.Body.Close()
			err = fmt.Errorf("%s: %s", path, answer.Status)
		}
		return answer, err
	}
	failed := func(err error) {
		if ctx.Err() == nil {
			c.t.Error(err)
		}
	}
	var listed sync.WaitGroup
	for range pages {
		for _, kind := range []string{"/api/v1/services", "/apis/discovery.k8s.io/v1/endpointslices", "/api/v1/nodes"} {
			listed.Add(1)
			wg.Go(func() {
				whole := sync.OnceFunc(listed.Done)
				defer whole()
				answer, err := get(kind + "?watch=1&allowWatchBookmarks=true&sendInitialEvents=true&resourceVersionMatch=NotOlderThan")
				if err != nil {
					failed(err)
					return
				}
				defer answer.Body.Close()
				for in := bufio.NewReader(answer.Body); ; { // until ctx ends
					line, err := in.ReadBytes('\n')
					if bytes.Contains(line, []byte(metav1.InitialEventsAnnotationKey)) {
						whole()
					}
					if err != nil {
						failed(err)
						return
					}
				}
			})
		}
		wg.Go(func() {
			for ctx.Err() == nil {
				answer, err := get("/fairlead/connections")
				if err != nil {
					failed(err)
					return
				}
				_, _ = io.Copy(io.Discard, answer.Body)
				answer.Body.Close()
				select {
				case <-ctx.Done():
				case <-time.After(10 * time.Second):
				}
			}
		})
	}
	listed.Wait()
	before = c.serverTime()
	begin := time.Now()
	time.Sleep(pagesFor)
	took := time.Since(begin)
	used := c.serverTime() - before
	share := func(d time.Duration) float64 { return 100 * d.Seconds() / took.Seconds() }
	c.t.Logf("%d pages: the server used %.1f %% of a processor, and %.1f %% without them", pages, share(used), share(idle))
	if extra := share(used - idle); extra > 20 {
		c.t.Errorf("%d open pages cost %.1f %% of a processor", pages, extra)
	}
}

// serverTime is the processor time that the server has used (proc_pid_stat(5): fields 14 and 15, in 1/100 s).
func (c *cluster) serverTime() time.Duration {
	c.t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", c.api.Pid()))
	if err != nil {
		c.t.Fatal(err)
	}
	words := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
	var ticks int
	for _, w := range words[11:13] {
		n, err := strconv.Atoi(w)
		if err != nil {
			c.t.Fatal(err)
		}
		ticks += n
	}
	return time.Duration(ticks) * 10 * time.Millisecond
}
