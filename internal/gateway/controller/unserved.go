package controller

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/reflector"
	"github.com/fairlead/fairlead/internal/svc"
)

// ConditionUnserved is of a route with a Service as its parent: it is True while clients on some nodes reach the Service's own
// endpoints, as without the route. There is none in good times.
const ConditionUnserved = svc.Domain + "/UnservedOnNodes"

// unserved are the nodes that do not serve routes with Services as parents, or Gateways as they are now. Its methods are safe for
// concurrent use.
type unserved struct {
	client  kubernetes.Interface
	lb      *v1.Client
	changed func() // after a change; it does not block

	mu       sync.Mutex
	followed bool
	unlisted int                  // kinds
	nodes    map[string]bool      // by name; false for one that is not ready
	speakers map[string]*speaking // by the name of the node
}

// speaking is what the speaker of a node reports.
type speaking struct {
	noMesh   string // SpeakerStatus.NoMesh
	eligible bool
	gateways *v1.ServedGateways
}

func speakingOf(s *v1.Speaker) *speaking {
	return &speaking{s.Status.NoMesh, s.Status.Eligible, s.Status.Gateways}
}

func (s *speaking) equal(o *speaking) bool {
	return s.noMesh == o.noMesh && s.eligible == o.eligible && s.gateways.Equal(o.gateways)
}

// isReady reports whether a node is ready, as far as is known.
func isReady(n *corev1.Node) bool {
	return !slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status != corev1.ConditionTrue
	})
}

func newUnserved(config *rest.Config, client kubernetes.Interface, changed func()) (*unserved, error) {
	lb, err := v1.NewClient(config)
	return &unserved{client: client, lb: lb, changed: changed, nodes: map[string]bool{}, speakers: map[string]*speaking{}}, err
}

// follow follows Nodes and Speakers from now on.
func (u *unserved) follow(ctx context.Context, running *sync.WaitGroup) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.followed {
		return
	}
	u.followed, u.unlisted = true, 2
	nodes, speakers := reflector.From(u.client.CoreV1().Nodes(), metav1.ListOptions{}), reflector.From(u.lb.Speakers, metav1.ListOptions{})
	toNodes := followed(u, u.nodes, isReady, func(a, b bool) bool { return a == b })
	toSpeakers := followed(u, u.speakers, speakingOf, (*speaking).equal)
	running.Go(func() { reflector.Run(reflector.Quiet(ctx), "gateway/nodes", nodes, toNodes) })
	running.Go(func() { reflector.Run(reflector.Quiet(ctx), "gateway/speakers", speakers, toSpeakers) })
}

// followed keeps a value of each object.
func followed[T metav1.Object, V any](u *unserved, all map[string]V, of func(T) V, equal func(a, b V) bool) reflector.Sink[T] {
	change := func(do func() bool) {
		u.mu.Lock()
		differs := do()
		u.mu.Unlock()
		if differs {
			u.changed()
		}
	}
	first := true
	return reflector.Sink[T]{
		Replace: func(list []T) {
			change(func() bool {
				clear(all)
				for _, o := range list {
					all[o.GetName()] = of(o)
				}
				if first {
					first = false
					u.unlisted--
				}
				return true
			})
		},
		Set: func(o T) {
			change(func() bool {
				was, had := all[o.GetName()]
				now := of(o)
				all[o.GetName()] = now
				return !had || !equal(was, now)
			})
		},
		Delete: func(o T) {
			change(func() bool {
				delete(all, o.GetName())
				return true
			})
		},
	}
}

// maxNamed bounds how many nodes a condition names.
const maxNamed = 8

// why returns which nodes do not serve the routes, "" if all do, as far as is known. Where no node has a Speaker, they serve
// without saying so (--lb-announce none).
func (u *unserved) why() string {
	u.mu.Lock()
	defer u.mu.Unlock()
	if !u.followed || u.unlisted > 0 || len(u.speakers) == 0 {
		return ""
	}
	var out []string
	for name := range u.nodes {
		switch s := u.speakers[name]; {
		case s == nil:
			out = append(out, name+": it has no Speaker")
		case s.noMesh != "":
			out = append(out, name+": "+s.noMesh)
		}
	}
	return list(out, "; ")
}

// list returns the first names, sorted, with how many more there are.
func list(names []string, separator string) string {
	slices.Sort(names)
	if more := len(names) - maxNamed; more > 0 {
		names = append(names[:maxNamed], fmt.Sprintf("and %d more", more))
	}
	return strings.Join(names, separator)
}

// withUnserved appends ConditionUnserved to the conditions of a route for a Service, if the route is accepted and some nodes do not
// serve it (why).
func withUnserved(conditions []metav1.Condition, why string) []metav1.Condition {
	accepted := slices.IndexFunc(conditions, func(c metav1.Condition) bool {
		return c.Type == string(gwv1.RouteConditionAccepted) && c.Status == metav1.ConditionTrue
	})
	if accepted < 0 || why == "" {
		return conditions
	}
	return append(conditions, metav1.Condition{
		Type: ConditionUnserved, Status: metav1.ConditionTrue, Reason: "PlainConnections", Message: why,
		ObservedGeneration: conditions[accepted].ObservedGeneration,
	})
}
