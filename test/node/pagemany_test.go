package node

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// manyEndpoints is how many endpoints each Service has.
const manyEndpoints = 5

// wholePage is how long the page may take from the login until it has all Services and endpoints, with 10,000 Services.
const wholePage = time.Second

// The page reads long lists in one small answer each. With FAIRLEAD_TEST_SERVICES=10000 it has 50,000 endpoints, and on a quiet machine
// the time is worth a look.
func TestPageOfManyServices(t *testing.T) {
	named := 1000
	if text := os.Getenv("FAIRLEAD_TEST_SERVICES"); text != "" {
		n, err := strconv.Atoi(text)
		if err != nil || n <= 200 {
			t.Fatalf("FAIRLEAD_TEST_SERVICES is %q; want a number over 200, which the page reads at first", text)
		}
		named = n
	}
	c := newServer(t, nil, nil)
	begin := time.Now()
	c.fill(named, manyEndpoints)
	t.Logf("%d Services with %d endpoints each were written in %s", named, manyEndpoints, time.Since(begin).Round(time.Millisecond))
	b := newBrowser(t, c.on(c.server, process.Build(t, "test/browser", ".")))
	c.completes(b, c.administrator(), named)
}

// administrator returns a token of a user who may read all.
func (c *cluster) administrator() string {
	c.t.Helper()
	c.kubectl("create", "serviceaccount", "page")
	c.kubectl("create", "clusterrolebinding", "page", "--clusterrole=cluster-admin", "--serviceaccount=default:page")
	return strings.TrimSpace(c.kubectl("create", "token", "page"))
}

// fill writes Services, each with an EndpointSlice of so many endpoints.
func (c *cluster) fill(services, endpoints int) {
	c.t.Helper()
	c.kubectl("create", "namespace", "many")
	ctx := c.t.Context()
	one := func(i int) error {
		name := fmt.Sprintf("s%d", i)
		s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "many", Name: name}, Spec: corev1.ServiceSpec{
			Ports: []corev1.ServicePort{{Name: "http", Port: 80}},
		}}
		_, err := c.api.Client.CoreV1().Services("many").Create(ctx, s, metav1.CreateOptions{})
		if err != nil {
			return err
		}
		port, portName, ready := int32(8080), "http", true
		slice := &discoveryv1.EndpointSlice{
			ObjectMeta: metav1.ObjectMeta{Namespace: "many", Name: name + "-x1y2z",
				Labels: map[string]string{discoveryv1.LabelServiceName: name, discoveryv1.LabelManagedBy: "test"}},
			AddressType: discoveryv1.AddressTypeIPv4,
			Ports:       []discoveryv1.EndpointPort{{Name: &portName, Port: &port}},
		}
		for e := range endpoints {
			n := i*endpoints + e
			node := fmt.Sprintf("node-%d", n%100)
			slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{
				Addresses:  []string{fmt.Sprintf("10.%d.%d.%d", 128+n>>16, n>>8&255, n&255)},
				Conditions: discoveryv1.EndpointConditions{Ready: &ready, Serving: &ready},
				NodeName:   &node,
				TargetRef: &corev1.ObjectReference{Kind: "Pod", Namespace: "many", Name: fmt.Sprintf("%s-5d8f9c7b4-%05d", name, n),
					UID: "0b8d5a52-6d57-4b0b-9f0b-0d2d5c7f9f11"},
			})
		}
		_, err = c.api.Client.DiscoveryV1().EndpointSlices("many").Create(ctx, slice, metav1.CreateOptions{})
		return err
	}
	var next atomic.Int64
	var wg sync.WaitGroup
	errs := make([]error, 16)
	for w := range errs {
		wg.Go(func() {
			for i := int(next.Add(1)) - 1; i < services && errs[w] == nil; i = int(next.Add(1)) - 1 {
				errs[w] = one(i)
			}
		})
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		c.t.Fatal(err)
	}
}

// Bounds of the answers for one Service with its endpoints, in bytes: as they are sent, and of JSON. The API's own lists have 4,600.
const maxWire, maxText = 320, 1700

// completes measures how long the page takes from the login until it shows the numbers of all Services and endpoints. The machine may be
// busy with other tests: the time is told, and what the page reads for it is held against bounds.
func (c *cluster) completes(b *browser, token string, named int) {
	c.t.Helper()
	least := testbed.Patience
	for range 3 {
		b.do("open", "about:blank")
		b.do("open", c.api.Config.Host+"/ui/")
		b.do("wait", "document.querySelector('#token')")
		b.do("into", "#token", "text", token)
		var took struct{ All, Services, Report float64 }
		if err := json.Unmarshal(b.do("eval", fmt.Sprintf(complete, named, named*manyEndpoints)), &took); err != nil {
			c.t.Fatal(err)
		}
		var read struct {
			Pages, Wire, Text, Time int
		}
		if err := json.Unmarshal(b.do("eval", whatWasRead), &read); err != nil {
			c.t.Fatal(err)
		}
		c.t.Logf("ms since the login: %+v; the lists: %+v", took, read)
		if read.Pages != 0 || read.Wire == 0 || read.Wire > named*maxWire || read.Text > named*maxText {
			c.t.Errorf("the page reads %d more pages of lists, and %d bytes over the wire, %d of JSON; want none, at most %d and %d",
				read.Pages, read.Wire, read.Text, named*maxWire, named*maxText)
		}
		least = min(least, time.Duration(took.All)*time.Millisecond)
	}
	c.t.Logf("the page was complete after %s; wanted on a quiet machine, with 10,000 Services: %s", least, wholePage)
}

// whatWasRead is how many pages of lists have been read beside the first ones, and the bytes of the lists that the server has cut down.
const whatWasRead = `(() => {
	const all = performance.getEntriesByType('resource');
	const of = all.filter((e) => e.name.includes('/fairlead/objects'));
	const sum = (f) => of.reduce((n, e) => n + f(e), 0);
	return { Pages: all.filter((e) => /[?&]continue=./.test(e.name)).length, Wire: sum((e) => e.encodedBodySize),
		Text: sum((e) => e.decodedBodySize), Time: Math.round(Math.max(...of.map((e) => e.duration))) };
})()`

// complete logs in, waits for the numbers and the list, and then for the report.
const complete = `new Promise((done) => {
	const begin = performance.now();
	const took = { All: 0, Services: 0, Report: 0 };
	document.querySelector('button[type=submit]').click();
	const look = () => {
		const now = performance.now() - begin;
		const numbers = document.querySelector('.numbers');
		const [services, endpoints] = numbers ? [...numbers.querySelectorAll('dd:not(.quiet)')].map((e) => e.innerText) : [];
		if (Number(services) >= %d) took.Services ||= now;
		if (took.Services && Number(endpoints) >= %d) took.All ||= now;
		const head = document.querySelector('.headline');
		if (took.All && head && !head.innerText.startsWith('looking')) {
			took.Report = now;
			done(took);
			return;
		}
		requestAnimationFrame(look);
	};
	look();
})`
