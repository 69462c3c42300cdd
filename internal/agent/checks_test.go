package agent

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"

	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/fairlead/fairlead/internal/checks"
	"github.com/fairlead/fairlead/internal/svc"
)

// A namespace with more endpoints than a node checks takes no place of another's. Its slices have
// an Event that says so, and the log a line, once and not at each change.
func TestChecksAreShared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log strings.Builder
		client := fake.NewClientset()
		c := NewChecks(client, "n0", slog.New(slog.NewTextHandler(&log, nil)))
		stop := c.events.Start()
		c.setNode("n0", true)
		slice := func(namespace, name string, n int) *discoveryv1.EndpointSlice {
			s := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, UID: types.UID(namespace + name),
				Annotations: map[string]string{svc.CheckAnnotation: "tcp://:80"}}}
			for i := range n {
				s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{fmt.Sprintf("192.0.2.%d", i+1)}})
			}
			return s
		}
		const crowd = 7
		for i := range crowd {
			s := slice("crowd", fmt.Sprintf("s%d", i), checks.MaxPerSlice)
			c.setSlice(s, checks.Of(s))
		}
		shop := slice("shop", "db", 20)
		c.setSlice(shop, checks.Of(shop))
		for range 3 {
			mine := c.mine()
			if len(mine) != checks.MaxPerNode {
				t.Fatalf("%d are checked", len(mine))
			}
			for _, target := range checks.Of(shop) {
				if _, is := mine[target.Key]; !is {
					t.Errorf("%s of the small namespace is not checked", target.Addr)
				}
			}
		}
		synctest.Wait()
		events, err := client.CoreV1().Events(metav1.NamespaceAll).List(context.Background(), metav1.ListOptions{})
		if err != nil || len(events.Items) != crowd {
			t.Errorf("%d Events, %v; want one for each slice of the crowd", len(events.Items), err)
		}
		for _, e := range events.Items {
			of := e.InvolvedObject
			if e.Reason != "EndpointsNotChecked" || of.Kind != "EndpointSlice" || of.UID == "" || e.Namespace != "crowd" || e.Count != 1 {
				t.Errorf("%+v", e)
			}
		}
		for i := range crowd {
			c.setSlice(slice("crowd", fmt.Sprintf("s%d", i), 0), nil)
		}
		if mine := c.mine(); len(mine) != 20 {
			t.Errorf("%d are checked without the crowd", len(mine))
		}
		stop()
		if n := strings.Count(log.String(), "\n"); n != 2 || !strings.Contains(log.String(), "cannot check all") {
			t.Errorf("logged %s", log.String())
		}
	})
}
