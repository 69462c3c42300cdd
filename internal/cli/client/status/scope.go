package status

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/fairlead/fairlead/internal/cli/base"
)

// scope is what a report is about: everything, a namespace, or a Service of it.
type scope struct{ namespace, service string }

// has reports whether a Service, NAMESPACE/NAME, is in scope.
func (c scope) has(name string) bool {
	namespace, service, _ := strings.Cut(name, "/")
	return (c.namespace == "" || c.namespace == namespace) && (c.service == "" || c.service == service)
}

// services returns the Services in scope, and an error if the one that is asked for does not exist.
func (c scope) services(all []corev1.Service) ([]corev1.Service, error) {
	var out []corev1.Service
	var names []string
	for i := range all {
		if c.namespace == all[i].Namespace {
			names = append(names, all[i].Name)
		}
		if c.has(all[i].Namespace + "/" + all[i].Name) {
			out = append(out, all[i])
		}
	}
	if c.service != "" && len(out) == 0 {
		return nil, fmt.Errorf("there is no service %s in namespace %s; there are: %s%s", c.service, c.namespace,
			cmp.Or(strings.Join(names, ", "), "none"), base.DidYouMean(c.service, "", names))
	}
	return out, nil
}

// pods returns the Pods in scope: the Pods of the Service, if one is asked for.
func (c scope) pods(all []corev1.Pod, services []corev1.Service) []corev1.Pod {
	if c.namespace == "" {
		return all
	}
	return slices.DeleteFunc(slices.Clone(all), func(p corev1.Pod) bool {
		if p.Namespace != c.namespace || c.service == "" {
			return p.Namespace != c.namespace
		}
		selector := services[0].Spec.Selector
		for k, v := range selector {
			if has, ok := p.Labels[k]; !ok || has != v {
				return true
			}
		}
		return len(selector) == 0
	})
}

// endpointReport is an endpoint of the Service that was asked for.
type endpointReport struct {
	Addresses []string `json:"addresses"`
	Pod       string   `json:"pod,omitempty"`
	Node      string   `json:"node,omitempty"`
	Ready     bool     `json:"ready"`
	// Why is what keeps it from being ready.
	Why string `json:"why,omitempty"`
}

func endpointReports(s *corev1.Service, all []discoveryv1.EndpointSlice, pods *podIndex, now time.Time) (out []endpointReport) {
	for i := range all {
		if all[i].Namespace != s.Namespace || all[i].Labels[discoveryv1.LabelServiceName] != s.Name {
			continue
		}
		for _, e := range all[i].Endpoints {
			r := endpointReport{Addresses: e.Addresses, Ready: e.Conditions.Ready == nil || *e.Conditions.Ready}
			if e.TargetRef != nil && e.TargetRef.Kind == "Pod" {
				r.Pod = e.TargetRef.Name
			}
			if e.NodeName != nil {
				r.Node = *e.NodeName
			}
			if !r.Ready {
				r.Why, _ = pods.whyUnready(s.Namespace, &e, now)
			}
			out = append(out, r)
		}
	}
	slices.SortFunc(out, func(a, b endpointReport) int {
		return cmp.Or(strings.Compare(a.Pod, b.Pod), slices.Compare(a.Addresses, b.Addresses))
	})
	return out
}

func (r *Report) printEndpoints(w io.Writer) {
	if r.scope.service == "" {
		return
	}
	fmt.Fprintln(w, "\nENDPOINT\tPOD\tNODE\tREADY\tWHY")
	for _, e := range r.Endpoints {
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\n", strings.Join(e.Addresses, ","), cmp.Or(e.Pod, "-"), cmp.Or(e.Node, "-"), yesNo(e.Ready),
			cmp.Or(base.PlainLine(e.Why), "-"))
	}
}
