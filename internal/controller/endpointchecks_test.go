package controller

import (
	"context"
	"fmt"
	"slices"
	"testing"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fairlead/fairlead/internal/checks"
	"github.com/fairlead/fairlead/internal/svc"
)

// finds has a node report what it finds.
func (r *rig) finds(node string, report checks.Report) {
	r.Helper()
	api, text := r.client.CoordinationV1().Leases(corev1.NamespaceNodeLease), report.String()
	patch := fmt.Appendf(nil, `{"metadata":{"annotations":{%q:%q}}}`, svc.ChecksAnnotation, text)
	_, err := api.Patch(context.Background(), node, types.MergePatchType, patch, metav1.PatchOptions{})
	if apierrors.IsNotFound(err) {
		l := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: node, Annotations: map[string]string{svc.ChecksAnnotation: text}}}
		_, err = api.Create(context.Background(), l, metav1.CreateOptions{})
	}
	r.must(err)
}

// An endpoint of a slice made by hand leaves when two of the nodes that check it report it, and
// comes back when two report that it answers. One node alone, which may be stolen, changes
// nothing, nor does one that is not to check it. One that terminates stays as it is.
func TestCheckedEndpoints(t *testing.T) {
	r := newRig(t)
	r.run(Options{Controllers: []string{ChecksName}})
	ns := r.namespace("shop")
	for _, name := range []string{"n0", "n1", "n2", "n3"} {
		r.node(name)
	}
	s, err := r.client.DiscoveryV1().EndpointSlices(ns).Create(context.Background(), &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{Name: "db", Labels: map[string]string{discoveryv1.LabelServiceName: "db"},
			Annotations: map[string]string{svc.CheckAnnotation: "tcp://:5432"}},
		AddressType: discoveryv1.AddressTypeIPv4, Ports: []discoveryv1.EndpointPort{{Port: new(int32(5432))}},
		Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"192.0.2.7"}}, {Addresses: []string{"192.0.2.8"}},
			{Addresses: []string{"192.0.2.9"}, Conditions: discoveryv1.EndpointConditions{Ready: new(false), Terminating: new(true)}}},
	}, metav1.CreateOptions{})
	r.must(err)
	if s.Labels[svc.CheckedLabel] != "true" {
		t.Errorf("its labels are %v, by which no node finds it", s.Labels)
	}
	s.Endpoints[2].Conditions.Terminating = nil
	targets, all := checks.Of(s), []string{"n0", "n1", "n2", "n3"}
	key, marker, ending := targets[0].Key, targets[1].Key, targets[2].Key
	by := checks.By(key, all)
	other := all[slices.IndexFunc(all, func(n string) bool { return !slices.Contains(by, n) })]
	want := func(what, want string) {
		t.Helper()
		r.eventually(what, func() error {
			got := ""
			for _, e := range r.slices(ns, "db")[0].Endpoints {
				got += fmt.Sprintf(" %v", e.Conditions.Ready == nil || *e.Conditions.Ready)
			}
			if got != want {
				return fmt.Errorf("ready:%s, want%s", got, want)
			}
			return nil
		})
	}
	// All nodes find what the marker is of not to answer: that this is seen shows that the rest had no effect.
	r.finds(other, checks.Report{key: false, marker: false, ending: true})
	r.finds(by[0], checks.Report{key: false, marker: false, ending: true})
	r.finds(by[1], checks.Report{marker: false, ending: true})
	r.finds(by[2], checks.Report{key: true, marker: false, ending: true})
	want("one of three, and another node, report it", " true false false")
	r.finds(by[1], checks.Report{key: false})
	want("two of three report it", " false false false")
	r.finds(by[1], checks.Report{key: true, marker: true})
	want("two of three report that it answers", " true false false")
	r.wantEvent(ns, "db", "EndpointCheckFailed")
	r.wantEvent(ns, "db", "EndpointCheckPassed")
}
