package explaincmd

import (
	"bytes"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/cli/client/asking"
	"github.com/fairlead/fairlead/internal/explain"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// What a node sends is not trusted: it cannot end the command, speak for another node, send without an end, or write to the
// terminal. The node is then explained by what the API has.
func TestHostileAnswers(t *testing.T) {
	const maxAnswer = 32 << 20 // of package asking, bytes
	const evil = `\u001b[2J\u001b]0;x\u0007`
	port := func(more string) string {
		return `{"ID":{"Namespace":"default","Name":"web","Port":"` + evil + `"},"Protocol":6,"Frontends":[{"Addr":"10.96.0.10:80"}]` + more + `}`
	}
	var answer string
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/api/v1/nodes/n0/proxy/explain" {
			t.Errorf("asked for %s", r.URL.Path)
		}
		if got := r.URL.Query()["client"]; !slices.Equal(got, []string{"192.0.2.1", "2001:db8::1"}) {
			t.Errorf("the client is %q", got)
		}
		if answer != "long" {
			_, _ = w.Write([]byte(answer))
			return
		}
		for range maxAnswer>>20 + 1 {
			if _, err := w.Write(bytes.Repeat([]byte(" "), 1<<20)); err != nil {
				return
			}
		}
		_, _ = w.Write([]byte("{}"))
	}))
	defer server.Close()
	client, err := kubernetes.NewForConfig(&rest.Config{Host: server.URL})
	if err != nil {
		t.Fatal(err)
	}
	name := svc.Name{Namespace: "default", Name: "web"}
	web := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web"}, Spec: corev1.ServiceSpec{
		ClusterIP: "10.96.0.10", ClusterIPs: []string{"10.96.0.10"}, Ports: []corev1.ServicePort{{Port: 80, Protocol: corev1.ProtocolTCP}}}}
	c := &cluster{nodes: map[string]*corev1.Node{}, names: []string{"n0"}, tables: map[string]*table.Table{}}
	c.objects.Services = []*corev1.Service{web}
	q := &explain.Question{Service: name, Client: explain.Client{Addrs: []netip.Addr{
		netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")}}}
	for what, from := range map[string]struct{ answer, problem string }{
		"an honest one":       {`{"node":"n0","mode":"nft","ports":[` + port("") + `]}`, ""},
		"an empty port":       {`{"ports":[{}]}`, "ports[0] is empty"},
		"an unknown kind":     {`{"ports":[{"Frontends":[{"Kind":200}]}]}`, "unknown kind"},
		"null":                {`{"ports":[null]}`, "ports[0] is empty"},
		"more than frontends": {`{"ports":[` + port(`,"installed":[{"present":false},{"present":true}]`) + `]}`, "2 are installed"},
		"too long":            {"long", "longer than 32 MiB"},
		"no JSON":             {"<html>", "invalid character"},
		"of another node":     {`{"node":"other` + evil + `","mode":"` + evil + `","ports":[` + port("") + `]}`, ""},
		"escapes everywhere": {`{"problem":"` + evil + `","problems":["` + evil + `"],` +
			`"ports":[` + port(`,"rejected":"`+evil+`"`) + `]}`, evil},
		"probes of no endpoint": {`{"ports":[` + port("") + `],"probes":[{"endpoint":"10.1.1.1:80","result":"` + evil + `"}]}`, ""},
	} {
		answer = from.answer
		facts := c.facts(t.Context(), asking.New(client), "n0", q, &Asked{Question: "web", Probe: true})
		var problem string
		_ = json.Unmarshal([]byte(`"`+from.problem+`"`), &problem)
		if facts.Node != "n0" || !strings.Contains(facts.Problem, problem) || problem == "" && facts.Problem != "" {
			t.Errorf("%s: node %q, problem %q, want n0, %q", what, facts.Node, facts.Problem, problem)
		}
		r := &Report{Question: "web", Verdicts: []*explain.Verdict{explain.Explain(q, &c.objects, facts)}}
		var out bytes.Buffer
		if err := r.print(&out); err != nil {
			t.Fatal(err)
		}
		if strings.ContainsAny(out.String(), "\x1b\x07") || !strings.Contains(out.String(), "on node n0") {
			t.Errorf("%s: %q", what, out.String())
		}
	}
}

// Names in the API may be written by others, too.
func TestPrintedNamesArePlain(t *testing.T) {
	const evil = "\x1b[2J"
	v := &explain.Verdict{Node: evil, Mode: evil, Client: explain.Client{Text: evil, Node: evil},
		Lines:     []explain.Line{{Text: evil, Source: evil}},
		Frontends: []explain.Frontend{{Kind: evil, Protocol: evil, Address: evil}},
		Endpoints: []explain.Endpoint{{Address: evil, Pod: evil, Node: evil, Why: []explain.Line{{Text: evil, Source: evil}}}}}
	var out bytes.Buffer
	if err := (&Report{Question: evil, Verdicts: []*explain.Verdict{v, v}}).print(&out); err != nil {
		t.Fatal(err)
	}
	h := History{Service: "default/web", Changes: []nodeHistory{{Node: evil}}, Problems: []string{evil}}
	h.Changes[0].Time, h.Changes[0].After = time.Unix(0, 0), evil
	if err := h.print(&out); err != nil {
		t.Fatal(err)
	}
	if strings.Contains(out.String(), "\x1b") {
		t.Errorf("%q", out.String())
	}
}

// A user of one namespace, who may not list Nodes nor ask them, gets the answer by the objects of that namespace.
func TestUserOfOneNamespace(t *testing.T) {
	service := func(name string) corev1.Service {
		return corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name}, Spec: corev1.ServiceSpec{
			ClusterIP: "10.96.0.10", ClusterIPs: []string{"10.96.0.10"}, Ports: []corev1.ServicePort{{Port: 80, Protocol: corev1.ProtocolTCP}}}}
	}
	slice := discoveryv1.EndpointSlice{AddressType: discoveryv1.AddressTypeIPv4, ObjectMeta: metav1.ObjectMeta{
		Namespace: "shop", Name: "web-1", Labels: map[string]string{discoveryv1.LabelServiceName: "web"}},
		Ports:     []discoveryv1.EndpointPort{{Port: new(int32(8080)), Name: new(""), Protocol: new(corev1.ProtocolTCP)}},
		Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"10.244.0.5"}, NodeName: new("n7")}}}
	lists := map[string]any{
		"/api/v1/namespaces/shop/services":                         corev1.ServiceList{Items: []corev1.Service{service("web"), service("cart")}},
		"/apis/discovery.k8s.io/v1/namespaces/shop/endpointslices": discoveryv1.EndpointSliceList{Items: []discoveryv1.EndpointSlice{slice}},
		"/api/v1/namespaces/shop/services/web":                     service("web"),
		"/api/v1/namespaces/shop/services/cart":                    service("cart"),
		"/api/v1/namespaces/shop/pods":                             corev1.PodList{},
	}
	var all atomic.Bool // a kind was asked for in all namespaces
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		all.Store(all.Load() || slices.Contains([]string{"/api/v1/services", "/apis/discovery.k8s.io/v1/endpointslices", "/api/v1/pods",
			"/api/v1/namespaces"}, r.URL.Path))
		list, ok := lists[r.URL.Path]
		if of, found := strings.CutPrefix(r.URL.Query().Get("labelSelector"), discoveryv1.LabelServiceName+"="); found && of != "web" {
			list = discoveryv1.EndpointSliceList{}
		}
		if !ok {
			w.WriteHeader(http.StatusForbidden)
			list = metav1.Status{Status: metav1.StatusFailure, Reason: metav1.StatusReasonForbidden, Code: http.StatusForbidden}
		}
		_ = json.NewEncoder(w).Encode(list)
	}))
	defer server.Close()
	client, err := kubernetes.NewForConfig(&rest.Config{Host: server.URL, ContentConfig: rest.ContentConfig{ContentType: "application/json"}})
	if err != nil {
		t.Fatal(err)
	}
	for question, want := range map[string]struct {
		node, problem string
		answer        explain.Answer
		cause         explain.Cause
	}{
		"web":          {"n7", "it takes the right to get nodes/proxy", explain.Answers, ""},
		"cart":         {"", noNodes, explain.Refused, explain.NoEndpoint},
		"10.96.0.9:80": {"", noNodes, explain.Elsewhere, explain.NoService},
	} {
		all.Store(false)
		r, err := Ask(t.Context(), asking.New(client), &Asked{Question: question, Namespace: "shop", Probe: true})
		if one := !strings.Contains(question, ":"); one == all.Load() {
			t.Errorf("%s: asked for all namespaces: %t", question, all.Load())
		}
		if err != nil || len(r.Verdicts) != 1 {
			t.Errorf("%s: %+v, %v", question, r, err)
			continue
		}
		if f := r.Finding; f == nil || f.Answer != want.answer || f.Cause != want.cause || f.Text == "" {
			t.Errorf("%s: the finding is %+v", question, f)
		}
		v := r.Verdicts[0]
		if v.Node != want.node || v.Answer != want.answer || v.Cause != want.cause || !strings.Contains(v.Lines[0].Text, want.problem) {
			t.Errorf("%s: %+v", question, v)
		}
		var out bytes.Buffer
		if err := r.print(&out); err != nil || want.node == "" && !strings.Contains(out.String(), " on any node: ") ||
			want.node == "" != strings.Contains(out.String(), "--node") {
			t.Errorf("%s: %v\n%s", question, err, &out)
		}
	}
	past, err := Past(t.Context(), asking.New(client), svc.Name{Namespace: "shop", Name: "cart"}, "", time.Hour)
	if err != nil || len(past.Changes) > 0 || len(past.Problems) != 1 || past.Problems[0] != noNodes {
		t.Errorf("the history: %+v, %v", past, err)
	}
	var out bytes.Buffer
	if err := past.print(&out); err != nil || !strings.Contains(out.String(), noNodes+": "+nameOne) {
		t.Errorf("%v\n%s", err, &out)
	}
}
