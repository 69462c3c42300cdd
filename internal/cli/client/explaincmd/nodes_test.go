package explaincmd

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
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
)

// manyNodes are more than a question asks at a time, n00 and so on.
func manyNodes() (out []corev1.Node) {
	for i := range maxNodes + 8 {
		out = append(out, corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("n%02d", i)}})
	}
	return out
}

// The history asks nodes beside each other, so that some that hang leave time for the others.
func TestHistoryAsksNodesBesideEachOther(t *testing.T) {
	var together sync.WaitGroup
	together.Add(2)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		if r.URL.Path == "/api/v1/nodes" {
			_ = json.NewEncoder(w).Encode(corev1.NodeList{Items: manyNodes()[:2]})
			return
		}
		together.Done() // a node answers only after the other one is asked
		met := make(chan struct{})
		go func() { together.Wait(); close(met) }()
		select {
		case <-met:
			_, _ = w.Write([]byte(`[{"time":"2026-01-01T00:00:00Z","after":"x"}]`))
		case <-r.Context().Done():
		}
	}))
	defer server.Close()
	client := kubernetes.NewForConfigOrDie(&rest.Config{Host: server.URL, ContentConfig: rest.ContentConfig{ContentType: "application/json"}})
	past, err := Past(t.Context(), asking.New(client), svc.Name{Namespace: "default", Name: "web"}, "", time.Hour)
	if err != nil || len(past.Problems) > 0 || len(past.Changes) != 2 {
		t.Errorf("%+v, %v", past, err)
	}
}

// With a policy Local the nodes of the endpoints count, wherever they are in the list.
func TestJudgeManyNodes(t *testing.T) {
	nodes := manyNodes()
	last := nodes[len(nodes)-1].Name
	web := corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web"}, Spec: corev1.ServiceSpec{
		Type: corev1.ServiceTypeLoadBalancer, ClusterIP: "10.96.0.10", ClusterIPs: []string{"10.96.0.10"},
		Ports:                 []corev1.ServicePort{{Port: 80, NodePort: 30080, Protocol: corev1.ProtocolTCP}},
		ExternalTrafficPolicy: corev1.ServiceExternalTrafficPolicyLocal}}
	slice := discoveryv1.EndpointSlice{AddressType: discoveryv1.AddressTypeIPv4, ObjectMeta: metav1.ObjectMeta{
		Namespace: "default", Name: "web-1", Labels: map[string]string{discoveryv1.LabelServiceName: "web"}},
		Ports:     []discoveryv1.EndpointPort{{Port: new(int32(8080)), Name: new(""), Protocol: new(corev1.ProtocolTCP)}},
		Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"10.244.0.5"}, NodeName: &last}}}
	judge := func() []Finding {
		return JudgeObjects([]corev1.Service{web}, []discoveryv1.EndpointSlice{slice}, nodes, nil)
	}
	if got := judge(); len(got) > 0 {
		t.Errorf("a load balancer: %+v", got)
	}
	web.Spec.Type = corev1.ServiceTypeNodePort
	if got := judge(); len(got) != 1 || got[0].Answer != explain.Sometimes || got[0].Cause != explain.PolicyLocal {
		t.Errorf("a node port: %+v", got)
	}
	slice.Endpoints[0].NodeName = new("gone")
	if got := judge(); len(got) != 1 || got[0].Answer != explain.Dropped || got[0].Cause != explain.PolicyLocal {
		t.Errorf("on a node that was deleted: %+v", got)
	}
}

// A plan has all nodes. Without the right to read Nodes it only has the nodes of the endpoints, and has a note about that.
func TestPlanOfNodes(t *testing.T) {
	one := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Labels: map[string]string{
		discoveryv1.LabelServiceName: "web"}}, Endpoints: []discoveryv1.Endpoint{{NodeName: new("n7")}}}
	web := map[svc.Name]bool{{Namespace: "default", Name: "web"}: true}
	c := &cluster{nodes: map[string]*corev1.Node{}}
	var r planReport
	before, after := &explain.World{Slices: []*discoveryv1.EndpointSlice{one}}, &explain.World{}
	r.unread(c, before, after, web)
	if len(after.Nodes) != 1 || after.Nodes[0].Name != "n7" || len(r.Problems) != 2 || !strings.HasPrefix(r.Problems[0], noNodes) {
		t.Errorf("nodes %v, problems %q", after.Nodes, r.Problems)
	}
	c.putNodes(pointers(manyNodes()))
	c.objects.Pods = []*corev1.Pod{}
	r, after = planReport{}, c.world()
	r.unread(c, before, after, web)
	if len(after.Nodes) != maxNodes+8 || len(r.Problems) > 0 {
		t.Errorf("%d nodes, problems %q", len(after.Nodes), r.Problems)
	}
}
