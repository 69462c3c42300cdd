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

// unserved are the nodes that do not serve routes with Services as parents. Its methods are safe for concurrent use.
type unserved struct {
	client  kubernetes.Interface
	lb      *v1.Client
	changed func() // after a change; it does not block

	mu       sync.Mutex
	followed bool
	unlisted int               // kinds
	nodes    map[string]bool   // by name
	speakers map[string]string // SpeakerStatus.NoMesh by the name of the node
}

func newUnserved(config *rest.Config, client kubernetes.Interface, changed func()) (*unserved, error) {
	lb, err := v1.NewClient(config)
	return &unserved{client: client, lb: lb, changed: changed, nodes: map[string]bool{}, speakers: map[string]string{}}, err
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
	toNodes := followed(u, u.nodes, func(*corev1.Node) bool { return true })
	toSpeakers := followed(u, u.speakers, func(s *v1.Speaker) string { return s.Status.NoMesh })
	running.Go(func() { reflector.Run(reflector.Quiet(ctx), "gateway/nodes", nodes, toNodes) })
	running.Go(func() { reflector.Run(reflector.Quiet(ctx), "gateway/speakers", speakers, toSpeakers) })
}

// followed keeps a value of each object.
func followed[T metav1.Object, V comparable](u *unserved, all map[string]V, of func(T) V) reflector.Sink[T] {
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
				all[o.GetName()] = of(o)
				return !had || was != of(o)
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
		switch no, speaks := u.speakers[name]; {
		case !speaks:
			out = append(out, name+": it has no Speaker")
		case no != "":
			out = append(out, name+": "+no)
		}
	}
	slices.Sort(out)
	if more := len(out) - maxNamed; more > 0 {
		out = append(out[:maxNamed], fmt.Sprintf("and %d more", more))
	}
	return strings.Join(out, "; ")
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
