package node

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/explain"
	"github.com/fairlead/fairlead/internal/testbed"
)

// causes clicks at Services on the map, whose nodes must be asked; the map then has what the explanation says. With questions these are all
// causes.
func (c *cluster) causes(b *browser) {
	c.t.Helper()
	for name, want := range map[string][]string{
		"typo":     {"refused, NoEndpoint", "no Pod has the labels app=myapp"},
		"ports":    {"refused, WrongTargetPort", "targetPort htpp names no port of the Pods"},
		"number":   {"refused, WrongTargetPort", "nothing listens on endpoint", "spec.ports"},
		"starting": {"refused, Unready", "none of 1 endpoints is ready", "conditions.ready"},
		"ending":   {"refused, Terminating", "all 1 endpoints are terminating", "conditions.terminating"},
		"idle":     {"refused, WeightZero", "have weight 0", "annotation fairlead.dev/weight"},
		"local":    {"timeout, PolicyLocal", "spec.internalTrafficPolicy"},
		"far":      {"timeout, NoRouteOrDropped", "203.0.113.77:80 does not answer"},
		"half":     {"sometimes, NoRouteOrDropped", "203.0.113.78:9376 does not answer"},
		"removed":  {"RejectedByKernel", "the frontend is not installed"},
	} {
		b.do("eval", "location.hash = '#/map'")
		b.do("into", "#search", "text", "default/"+name)
		row := fmt.Sprintf("[...document.querySelectorAll('.row button')].find(e => e.innerText === 'default/%s')", name)
		b.do("wait", row)
		end := func() {}
		if name == "removed" {
			end = c.removes()
		}
		b.do("eval", row+".click()")
		b.answered("Service default/"+name, want...)
		end()
		if name == "removed" { // the node repairs it, so that the map has either
			continue
		}
		b.shows(".row.selected.bad, .row.selected.warn", "default/"+name, want[0])
	}
}

// answered waits until the explanation beside the view has all texts. What has not come to the node yet is asked again.
func (b *browser) answered(label string, texts ...string) {
	b.t.Helper()
	testbed.Until(b.t, fmt.Sprintf("the explanation of %s with %q", label, texts), func() error {
		b.do("wait", fmt.Sprintf("document.querySelector(%q) && document.querySelector('.detail .verdict')",
			".detail[aria-label='"+label+"'] [aria-busy=false]"))
		has := b.do("eval", fmt.Sprintf("[...document.querySelectorAll('.detail .verdict')].some(e => %s.every(t => e.innerText.includes(t)))",
			quoted(texts)))
		if string(has) == "true" {
			return nil
		}
		b.do("eval", "new Promise(done => setTimeout(done, 200))")
		b.do("click", ".detail form.tools button")
		return errors.New(b.text())
	})
}

// asked types a question, and waits for its explanation.
func (b *browser) asked(question string, texts ...string) {
	b.t.Helper()
	b.do("into", "#question", "text", question)
	b.do("key", "Enter")
	b.answered("Question "+question, texts...)
}

// questions asks for names and for addresses with a port, as the command takes them, and for clients.
func (c *cluster) questions(b *browser) {
	c.t.Helper()
	b.asked("10.96.99.99:80", "timeout, NoService", "no Service has the address 10.96.99.99")
	b.asked("my-servise.default.svc.cluster.local", "no such name, NameUnknown", "there is no Service default/my-servise")
	b.asked("203.0.113.90:80", "spec.loadBalancerSourceRanges")
	b.do("into", ".detail form.tools input", "text", "203.0.113.200")
	b.do("key", "Enter")
	b.answered("Question 203.0.113.90:80", "timeout, SourceRange", "client 203.0.113.200 is not in [198.51.100.0/24]")
	b.shows(".detail .headline", "timeout, SourceRange")
	b.shows(".detail .balancer", "load balancer of Service default/ranged, direct way", "203.0.113.90: ",
		"fairlead has not given the address to it")

	b.do("into", "#question", "text", "default/sticky")
	b.do("key", "Enter")
	b.answered("Service default/sticky", "ClusterIP TCP 10.96.77.79:80") // the heading has the focus by then
	b.do("into", ".detail form.tools input", "text", c.node.Name())
	b.do("key", "Enter")
	b.answered("Service default/sticky", "timeout, AffinityToDeadEndpoint", "is kept at 203.0.113.82:9376")

	b.asked("my-service.default.svc.cluster.local", "node "+c.node.Name()+": answers")
	b.shows(".detail", "It leads to Service default/my-service", "What changed")
	var shown string
	if err := json.Unmarshal(b.do("eval", "document.querySelector('#explain-json').textContent"), &shown); err != nil {
		c.t.Fatal(err)
	}
	var r struct{ Verdicts []explain.Verdict }
	if err := json.Unmarshal([]byte(shown), &r); err != nil || len(r.Verdicts) != 1 || r.Verdicts[0].Service != "default/my-service" {
		c.t.Errorf("the answer about a name: %v: %s", err, shown)
	}
	b.accessible("question")
	b.do("into", "#question", "text", "default/typo/x")
	b.do("key", "Enter")
	b.shows(".detail .trouble", `"default/typo/x" is not NAMESPACE/SERVICE`)
	b.do("eval", "location.hash = '#/map/default/my-service/x'")
	b.shows(".detail .trouble", `"default/my-service/x" is not NAMESPACE/SERVICE`)
	b.asked("my-service.default.svc.cluster.local", "node "+c.node.Name()+": answers")
	b.do("eval", "[...document.querySelectorAll('.detail button')].find(e => e.innerText === 'default/my-service').click()")
	b.answered("Service default/my-service", "answers")
}

// routes are an Ingress of this controller, to a Service that does not exist.
const routes = `
apiVersion: networking.k8s.io/v1
kind: IngressClass
metadata: {name: page}
spec: {controller: fairlead.dev/ingress}
---
apiVersion: networking.k8s.io/v1
kind: Ingress
metadata: {name: books}
spec:
  ingressClassName: page
  rules:
  - host: books.example
    http: {paths: [{path: /, pathType: Prefix, backend: {service: {name: nobooks, port: {number: 80}}}}]}
`

// lists looks for the load balancers and the routes of the first view.
func (c *cluster) lists(b *browser) {
	c.t.Helper()
	c.apply(routes)
	b.do("eval", "location.hash = '#/wrong'")
	b.shows("[aria-label='Load balancer addresses'] tr", "default/ranged", "203.0.113.90", "direct",
		"foreign: fairlead has not given the address to it")
	b.shows("[aria-label='Load balancer addresses'] tr", "default/balanced", "none yet")
	b.shows("[aria-label=Routes] tr", "Ingress", "default/books", "books.example", "problem: ", "nobooks")
	b.accessible("lists")
	b.do("eval", `[...document.querySelectorAll("[aria-label='Load balancer addresses'] button")].
		find(e => e.innerText === 'default/ranged').click()`)
	b.answered("Service default/ranged", "203.0.113.90")
	c.kubectl("delete", "ingress/books", "ingressclass/page")
	b.do("eval", "location.hash = '#/map'")
}

// wider are the parts of the page that scroll to the side.
const wider = `['html', '.top', '.body', 'main', '.table', '.detail'].filter(s => { const e = document.querySelector(s);
	return e && e.scrollWidth > e.clientWidth + 1; })`

// zoomed looks at every view at 200 %: nothing but tables of data scrolls to the side.
func (c *cluster) zoomed(b *browser) {
	c.t.Helper()
	b.do("zoom", "2")
	for _, view := range []string{"#/wrong", "#/map", "#/changes", "#/map/default/typo", "#/map/=/10.96.99.99%3A80"} {
		b.do("eval", fmt.Sprintf("location.hash = %q", view))
		if strings.Count(view, "/") > 1 {
			b.do("wait", "document.querySelector('.detail [aria-busy=false]') && document.querySelector('.detail .verdict')")
		}
		if strings.HasSuffix(view, "%3A80") {
			b.do("wait", `document.querySelector(".detail[aria-label='Question 10.96.99.99:80'] [aria-busy=false]")`)
		}
		b.do("eval", "new Promise(done => requestAnimationFrame(() => setTimeout(done, 100)))")
		if got := string(b.do("eval", wider)); got != "[]" {
			c.t.Errorf("at 200 %% the view %s scrolls to the side: %s", view, got)
		}
	}
	b.do("zoom", "1")
}

// moves are the elements that move by their style.
const moves = `[...document.querySelectorAll('*')].filter(e => [undefined, '::before', '::after'].some(p => {
	const s = getComputedStyle(e, p);
	return s.animationName !== 'none' || s.transitionDuration.split(', ').some(d => d !== '0s'); })).length`

// still looks for motion: there is some, and none for a user who does not want it.
func (c *cluster) still(b *browser) {
	c.t.Helper()
	b.do("eval", "location.hash = '#/map'")
	b.do("into", "#search", "text", "default/my-service")
	b.shows(".row.good", "default/my-service")
	b.do("motion", "no-preference")
	if n := string(b.do("eval", moves)); n == "0" {
		c.t.Error("nothing moves: the test looks for nothing")
	}
	b.do("motion", "reduce")
	if n := string(b.do("eval", moves)); n != "0" {
		c.t.Errorf("%s elements move although the user wants less motion", n)
	}
}

// tabTo presses Tab until an element that a selector finds has the focus. Where the focus is must be seen.
func (b *browser) tabTo(selector string) {
	b.t.Helper()
	for range 150 {
		b.do("key", "Tab")
		where := string(b.do("eval", fmt.Sprintf(`(e => e === document.body ? '' : getComputedStyle(e).outlineStyle === 'none' ?
			'unseen ' + e.outerHTML.slice(0, 200) : e.matches(%q) ? 'there' : '')(document.activeElement)`, selector)))
		if where == `"there"` {
			return
		}
		if where != `""` {
			b.t.Errorf("the focus is not seen: %s", where)
		}
	}
	b.t.Fatalf("Tab does not lead to %s", selector)
}

// keyboard uses the page without a mouse, from the login to an explanation and back.
func (c *cluster) keyboard(b *browser, token string) {
	c.t.Helper()
	b.do("open", "about:blank")
	b.do("open", c.api.Config.Host+"/ui")
	b.do("wait", "document.querySelector('#token')")
	b.tabTo("#token")
	b.do("key", token)
	b.do("key", "Enter")
	b.shows(".wrong li.bad", "default/typo")
	b.tabTo("nav a[href='#/map']")
	b.do("key", "Enter")
	b.do("wait", "document.querySelector('#search')")
	b.tabTo("#search")
	b.do("key", "default/typo")
	b.do("wait", "document.querySelectorAll('.row').length === 1")
	b.tabTo(".row button")
	b.do("key", "Enter")
	b.do("wait", "document.activeElement.matches('.detail h2')")
	b.answered("Service default/typo", "refused, NoEndpoint")
	b.tabTo(".detail form.tools input")
	b.do("key", c.node.Name())
	b.do("key", "Enter")
	b.shows(".detail .verdict", "no Pod has the labels app=myapp")
	b.do("key", "Escape")
	b.do("wait", "!document.querySelector('.detail')")
	b.tabTo("#search")
	b.do("eval", "document.querySelector('#search').select()")
	b.do("key", "default/")
	b.do("wait", "document.querySelectorAll('.row').length > 3")
	b.tabTo(".row button")
	b.do("key", "ArrowDown")
	b.do("wait", "document.activeElement.dataset.row === '1'")
	b.do("key", "ArrowUp")
	b.do("wait", "document.activeElement.dataset.row === '0'")
	b.tabTo("#question")
	b.do("key", "10.96.99.99:80")
	b.do("key", "Enter")
	b.answered("Question 10.96.99.99:80", "timeout, NoService")
	b.do("key", "Escape")
	b.do("wait", "!document.querySelector('.detail')")
}

// lostNodeOnPage is how long after the server the page may know that a node is lost.
const lostNodeOnPage = 2 * time.Second

// loses cuts a node off, and waits until the page shows it.
func (c *cluster) loses(b *browser) {
	c.t.Helper()
	host := c.network.Outside("mortal")
	c.cleansUp(host, host.Name())
	agent := c.agentOn(host, host.Name())
	b.do("eval", "location.hash = '#/wrong'")
	row := func(ready string) {
		c.t.Helper()
		b.do("wait", fmt.Sprintf(`[...document.querySelectorAll("tr")].some(r =>
			r.cells.length > 1 && r.cells[0].innerText === %q && r.cells[1].innerText.startsWith(%q))`, host.Name(), ready))
	}
	row("yes")

	client, err := c.client()
	if err != nil {
		c.t.Fatal(err)
	}
	lost, err := client.CoreV1().Nodes().Watch(c.t.Context(), metav1.ListOptions{FieldSelector: "metadata.name=" + host.Name()})
	if err != nil {
		c.t.Fatal(err)
	}
	defer lost.Stop()
	known := make(chan time.Time, 1)
	go func() {
		defer close(known)
		for e := range lost.ResultChan() {
			if n, ok := e.Object.(*corev1.Node); ok && slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool {
				return c.Type == corev1.NodeReady && c.Status != corev1.ConditionTrue
			}) {
				known <- time.Now()
				return
			}
		}
	}()
	host.Carrier(false)
	row("no")
	shown := time.Now()
	late := shown.Sub(testbed.Receive(c.t, "the server to know that the node is lost", known))
	c.t.Logf("the page showed a lost node %s after the server knew", late.Round(time.Millisecond))
	if late > lostNodeOnPage {
		c.t.Errorf("the page showed a lost node %s after the server knew, want %s", late, lostNodeOnPage)
	}
	agent.Kill()
	host.Carrier(true)
	c.kubectl("delete", "node", host.Name())
}
