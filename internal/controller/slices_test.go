package controller

import (
	"context"
	"io"
	"net/http"
	"strings"
	"testing"

	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/epslice"
	"github.com/fairlead/fairlead/internal/svc"
)

// lostAnswers carries requests with other methods than GET out and loses the answers.
type lostAnswers struct{ next http.RoundTripper }

func (l lostAnswers) RoundTrip(req *http.Request) (*http.Response, error) {
	resp, err := l.next.RoundTrip(req)
	if err != nil || req.Method == http.MethodGet {
		return resp, err
	}
	_, _ = io.Copy(io.Discard, resp.Body)
	_ = resp.Body.Close()
	return nil, io.ErrUnexpectedEOF
}

// What was written although the answer says otherwise is known before the next plan is made,
// however late the informer is: here there is none.
func TestLostAnswersOfWrites(t *testing.T) {
	r := newRig(t)
	ctx := context.Background()
	owner := svc.Name{Namespace: r.namespace("shop"), Name: "s"}
	config := rest.CopyConfig(r.config)
	config.Wrap(func(next http.RoundTripper) http.RoundTripper { return lostAnswers{next} })
	client, err := kubernetes.NewForConfig(config)
	r.must(err)
	st := &sliceStore{client: client, unknown: map[svc.Name]map[string]*discoveryv1.EndpointSlice{}}
	st.assumeCache = newAssumeCache(sliceOwner, func(svc.Name) bool { return false })
	write := func(p *epslice.Plan) {
		t.Helper()
		if err := st.write(ctx, owner, p); err == nil || !strings.Contains(err.Error(), "EOF") {
			t.Fatalf("a write without an answer: %v", err)
		}
		r.must(st.settle(ctx, owner))
		if len(st.unknown) != 0 {
			t.Errorf("unknown after settle: %v", st.unknown)
		}
	}
	s := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{Name: "s-1", Namespace: owner.Namespace, Labels: map[string]string{
			discoveryv1.LabelServiceName: owner.Name, discoveryv1.LabelManagedBy: epslice.ManagedBySelector,
		}},
		AddressType: discoveryv1.AddressTypeIPv4, Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"10.244.0.1"}}},
	}
	write(&epslice.Plan{Create: []*discoveryv1.EndpointSlice{s}})
	have := st.managed(owner, epslice.ManagedBySelector)
	if len(have) != 1 {
		t.Fatalf("after a create: %v", have)
	}
	more := have[0].DeepCopy()
	more.Endpoints = append(more.Endpoints, discoveryv1.Endpoint{Addresses: []string{"10.244.0.2"}})
	write(&epslice.Plan{Update: []*discoveryv1.EndpointSlice{more}})
	have = st.managed(owner, epslice.ManagedBySelector)
	if len(have) != 1 || len(have[0].Endpoints) != 2 {
		t.Fatalf("after an update: %v", have)
	}
	write(&epslice.Plan{Delete: have})
	if have = st.managed(owner, epslice.ManagedBySelector); len(have) != 0 {
		t.Fatalf("after a delete: %v", have)
	}
}
