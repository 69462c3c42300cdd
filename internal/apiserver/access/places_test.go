package access

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/client-go/kubernetes/fake"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/fairlead/fairlead/internal/svc"
)

// cluster is Nodes and the slices of kube-dns, as dnsPlaces sees them.
type cluster struct {
	*testing.T
	client *fake.Clientset
	nodes  cache.Indexer
	places *dnsPlaces
}

func newCluster(t *testing.T) *cluster {
	c := &cluster{t, fake.NewClientset(), cache.NewIndexer(cache.MetaNamespaceKeyFunc, cache.Indexers{}), nil}
	c.places = newDNSPlaces(c.client, nodeIndex{corelisters.NewNodeLister(c.nodes)})
	return c
}

// node has a Node of a join token, of none for "". Its Ready is Unknown if it is not alive.
func (c *cluster) node(name, token string, alive bool) {
	c.Helper()
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{nodeIdentity: identityOf(name, token)}}}
	n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
	if !alive {
		n.Status.Conditions[0].Status = corev1.ConditionUnknown
	}
	if err := c.nodes.Update(n); err != nil {
		c.Fatal(err)
	}
}

func identityOf(name, token string) string {
	if token == "" {
		return name
	}
	return name + identityToken + token
}

// slice is one of kube-dns with an endpoint of a node, of none for "".
func dnsSliceOf(name, node string, family discoveryv1.AddressType, inUse bool) *discoveryv1.EndpointSlice {
	e := discoveryv1.Endpoint{Conditions: discoveryv1.EndpointConditions{Ready: &inUse, Serving: &inUse}}
	if node != "" {
		e.NodeName = &node
	}
	return &discoveryv1.EndpointSlice{AddressType: family, Endpoints: []discoveryv1.Endpoint{e}, ObjectMeta: metav1.ObjectMeta{
		Namespace: dnsNamespace, Name: name, Labels: map[string]string{discoveryv1.LabelServiceName: svc.DNSService}}}
}

// has stores a slice.
func (c *cluster) has(s *discoveryv1.EndpointSlice) {
	c.Helper()
	api := c.client.DiscoveryV1().EndpointSlices(dnsNamespace)
	_ = api.Delete(c.Context(), s.Name, metav1.DeleteOptions{})
	if _, err := api.Create(c.Context(), s, metav1.CreateOptions{}); err != nil {
		c.Fatal(err)
	}
}

// write has a node of the token write its slice, and stores it if it may.
func (c *cluster) write(node, token string, old, now *discoveryv1.EndpointSlice) error {
	c.Helper()
	if anyInUse(now) && !anyInUse(old) {
		if err := c.places.take(c.Context(), node, &user.DefaultInfo{UID: identityOf(node, token)}, false); err != nil {
			return err
		}
	}
	c.has(now)
	return nil
}

// The nodes of one join token are never more than the other servers behind kube-dns, also when some end and return.
func TestPlacesOfOneToken(t *testing.T) {
	for _, test := range []struct {
		name   string
		others func(*cluster)
		want   int // of ten nodes
	}{
		{"no other", func(*cluster) {}, 2},
		{"the server", func(c *cluster) {
			c.node("s", "", true)
			c.has(dnsSliceOf("s", "s", discoveryv1.AddressTypeIPv4, true))
		}, 1},
		{"a dual-stack one without a node", func(c *cluster) {
			c.has(dnsSliceOf("o-4", "", discoveryv1.AddressTypeIPv4, true))
			c.has(dnsSliceOf("o-6", "", discoveryv1.AddressTypeIPv6, true))
		}, 1},
		{"three, of which one has ended and one's node is dead", func(c *cluster) {
			for i, use := range []bool{true, true, false} {
				name := fmt.Sprint("o", i)
				c.node(name, "", i != 1)
				c.has(dnsSliceOf(name, name, discoveryv1.AddressTypeIPv4, use))
			}
		}, 1},
		{"three", func(c *cluster) {
			for i := range 3 {
				name := fmt.Sprint("o", i)
				c.node(name, "x", true) // of another token
				c.has(dnsSliceOf(name, name, discoveryv1.AddressTypeIPv4, true))
			}
		}, 3},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := newCluster(t)
				test.others(c)
				old := map[string]*discoveryv1.EndpointSlice{}
				var inUse int
				for round := range 3 { // each takes what places there are, ends, and returns
					inUse = 0
					for i := range 10 {
						name := fmt.Sprint("n", i)
						c.node(name, "t", true)
						now := dnsSliceOf(name, name, discoveryv1.AddressTypeIPv4, true)
						if c.write(name, "t", old[name], now) == nil {
							old[name] = now
						}
						if anyInUse(old[name]) {
							inUse++
						}
					}
					if inUse != test.want {
						t.Errorf("round %d: %d nodes of a token are endpoints, want %d", round, inUse, test.want)
					}
					time.Sleep(2 * dnsTaken)
					for name, s := range old {
						c.node(name, "t", false)
						if round == 0 { // the next ones begin before it is marked
							continue
						}
						s = dnsSliceOf(name, name, s.AddressType, false)
						old[name] = s
						c.has(s)
					}
				}
			})
		})
	}
}

// The nodes of one join token can mark few slices unready in a time. One that is marked already, and the marks of an
// administrator's node, do not count.
func TestMarksOfOneToken(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t)
		c.node("a", "t", true)
		c.node("b", "t", true)
		c.node("s", "", true)
		serving := dnsSliceOf("x", "x", discoveryv1.AddressTypeIPv4, true)
		mark := func(node, token string, s *discoveryv1.EndpointSlice) error {
			return c.places.mayMark(s, node, &user.DefaultInfo{UID: identityOf(node, token)}, false)
		}
		for i := range 2 * dnsMarks {
			err := mark([]string{"a", "b"}[i%2], "t", serving)
			if (err == nil) != (i < dnsMarks) {
				t.Errorf("mark %d: %v", i, err)
			}
			if err := mark("s", "", serving); err != nil {
				t.Error(err)
			}
			if err := mark("a", "t", dnsSliceOf("x", "x", discoveryv1.AddressTypeIPv4, false)); err != nil {
				t.Error(err)
			}
		}
		time.Sleep(dnsMarkPeriod + time.Second)
		if err := mark("a", "t", serving); err != nil {
			t.Errorf("later: %v", err)
		}
	})
}

// The rate at which machines join holds for all servers together, and a request that several of them see counts once.
func TestJoinRateOfSeveralServers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := fake.NewClientset()
		servers := []*signer{{nodeRequests: &nodeRequests{client: client}}, {nodeRequests: &nodeRequests{client: client}}}
		begin := time.Now()
		var passed []time.Duration
		for i := 0; len(passed) < 2*joinBurst; time.Sleep(joinWait / 2) {
			for more := true; more; i++ {
				request := fmt.Sprint("node-csr-", i)
				for _, s := range servers {
					ok, err := s.mayJoin(context.Background(), request)
					if err != nil {
						t.Fatal(err)
					}
					more = ok
				}
				if more {
					passed = append(passed, time.Since(begin))
				}
			}
			i-- // the one that waits asks again
		}
		for i, at := range passed {
			want := max(0, time.Duration(i-joinBurst+1)*joinPeriod)
			if at < want || at > want+joinWait {
				t.Errorf("machine %d joined after %s, want %s", i, at, want)
			}
		}
		l, err := client.CoordinationV1().Leases(metav1.NamespaceSystem).Get(t.Context(), joinLease, metav1.GetOptions{})
		if err != nil || strings.Count(l.Annotations[svc.JoiningAnnotation], ",")+1 > keptRequests {
			t.Errorf("the Lease has %v, %v", l, err)
		}
	})
}
