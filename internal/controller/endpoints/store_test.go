package endpoints

import (
	"io"
	"strconv"
	"strings"
	"testing"

	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/fairlead/fairlead/internal/controller/kit"
	"github.com/fairlead/fairlead/internal/epslice"
	"github.com/fairlead/fairlead/internal/svc"
)

// loseAnswers makes client carry out writes and lose the answers. Like a server it gives objects UIDs and versions.
func loseAnswers(client *fake.Clientset) {
	version := 0
	store := func(a clienttesting.Action, obj runtime.Object) error {
		version++
		s := obj.(*discoveryv1.EndpointSlice).DeepCopy()
		s.UID, s.ResourceVersion = types.UID(s.Name), strconv.Itoa(version)
		if a.GetVerb() == "create" {
			return client.Tracker().Create(a.GetResource(), s, s.Namespace)
		}
		return client.Tracker().Update(a.GetResource(), s, s.Namespace)
	}
	client.PrependReactor("*", "endpointslices", func(a clienttesting.Action) (bool, runtime.Object, error) {
		var err error
		switch w := a.(type) {
		case clienttesting.GetAction:
			if a.GetVerb() == "get" {
				return false, nil, nil
			}
			d := a.(clienttesting.DeleteAction)
			err = client.Tracker().Delete(a.GetResource(), a.GetNamespace(), d.GetName())
		case clienttesting.CreateAction:
			err = store(a, w.GetObject())
		}
		if err != nil {
			return true, nil, err
		}
		return true, nil, io.ErrUnexpectedEOF
	})
}

// A write whose answer was lost is known before the next plan is made, however late the informer is: here there is none.
func TestLostAnswersOfWrites(t *testing.T) {
	ctx := t.Context()
	owner := svc.Name{Namespace: "shop", Name: "s"}
	client := fake.NewClientset()
	loseAnswers(client)
	st := &SliceStore{client: client, unknown: map[svc.Name]map[string]*discoveryv1.EndpointSlice{}}
	st.AssumeCache = kit.NewAssumeCache(kit.ServiceOf, func(svc.Name) bool { return false })
	write := func(p *epslice.Plan) {
		t.Helper()
		if err := st.write(ctx, owner, p); err == nil || !strings.Contains(err.Error(), "EOF") {
			t.Fatalf("a write without an answer: %v", err)
		}
		if err := st.settle(ctx, owner); err != nil {
			t.Fatal(err)
		}
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
