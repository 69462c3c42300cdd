package lbview

import (
	"context"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/explain"
	"github.com/fairlead/fairlead/internal/gateway/api"
)

// FrontLines describes the listeners of the Gateway, or of the Ingresses, that a Service is the front of; none if it is no front.
func FrontLines(ctx context.Context, client kubernetes.Interface, gateways *api.Client, s *corev1.Service) (out []explain.Line) {
	f := (&frontObjects{client: client, api: gateways}).frontOf(ctx, s)
	if f == nil {
		return nil
	}
	what, source := "all Ingresses", "Ingresses"
	if f.Name != "" {
		what = f.Kind + " " + s.Namespace + "/" + f.Name
		if source = what + " spec.listeners"; f.Kind == kindIngress {
			source = what
		}
	}
	add := func(text, problem, source string) {
		if problem != "" {
			text += ": " + problem
		}
		out = append(out, explain.Line{Text: text, Source: source})
	}
	add("it is the front of "+what, f.Problem, source)
	for i := range f.Listeners {
		l := &f.Listeners[i]
		text := fmt.Sprintf("listener %s on port %d: %s", l.name(), l.Port, l.Protocol)
		if l.Host != "" {
			text += ", host " + l.Host
		}
		from := source
		if l.Set != "" {
			from = "ListenerSet " + l.Set + " spec.listeners"
		}
		add(fmt.Sprintf("%s, %d routes", text, l.Routes), l.Problem, from)
	}
	for i := range f.Routes {
		if r := &f.Routes[i]; r.Problem != "" {
			add(fmt.Sprintf("%s %s/%s of hosts [%s]", r.Kind, r.Namespace, r.Name, strings.Join(r.Hosts, ", ")), r.Problem,
				r.Kind+" "+r.Namespace+"/"+r.Name+" status")
		}
	}
	return out
}
