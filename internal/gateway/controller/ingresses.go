package controller

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/gateway"
	"github.com/fairlead/fairlead/internal/gateway/names"
	"github.com/fairlead/fairlead/internal/gateway/trust"
	"github.com/fairlead/fairlead/internal/gateway/watch"
	"github.com/fairlead/fairlead/internal/svc"
)

const kindIngress = "Ingress"

// syncIngresses keeps the Services of the fronts of Ingresses, writes the statuses of these, and records what is wrong with them. It
// adds the Services to the ones that are wanted.
func (c *controller) syncIngresses(ctx context.Context, s *watch.State, have map[svc.Name]*corev1.Service, wanted map[svc.Name]bool) error {
	var errs []error
	statuses := map[svc.Name][]networkingv1.IngressLoadBalancerIngress{} // by front
	problems := map[svc.Name]string{}
	for _, n := range slices.SortedFunc(maps.Keys(s.IngressFronts), svc.Name.Compare) {
		f, service := s.IngressFronts[n], names.ServiceOfFront(n)
		want := serviceOfIngresses(n, s.Split.Ingresses(n)[n], f)
		now := have[service]
		if now != nil && !isOf(now, want) {
			now = nil
		} else {
			wanted[service] = true
		}
		problem, err := c.keepService(ctx, want, have[service])
		if errs = append(errs, ignoreRaces(err)); problem != "" {
			problems[n] = problem
			if n == names.SharedFront() {
				c.o.Log.Warn("cannot serve Ingresses", "err", problem)
			}
		}
		var ports []uint16
		for _, p := range want.Spec.Ports {
			ports = append(ports, uint16(p.Port)) //nolint:gosec // 80 and 443
		}
		statuses[n] = names.IngressStatus(addressesOf(now), ports)
	}
	c.loops.update(s.IngressFronts, s.Split)
	unordered := map[svc.Name]string{}
	for n, f := range s.IngressFronts {
		maps.Copy(unordered, c.certifier.unordered(n, f.Orders))
	}
	for n, in := range s.Ingresses {
		var status []networkingv1.IngressLoadBalancerIngress
		problem, ignored := s.Split.Problem(n), s.Split.Ignored(n)
		for _, at := range s.Split.At(n) {
			status = append(status[:len(status):len(status)], statuses[at]...)
			if at != names.SharedFront() {
				problem = cmp.Or(problem, problems[at])
			}
			problem = cmp.Or(problem, s.IngressFronts[at].Problems[n])
			ignored = joined(ignored, s.IngressFronts[at].Ignored[n])
		}
		if !slices.EqualFunc(in.Status.LoadBalancer.Ingress, status, sameAddress) {
			next := in.DeepCopy()
			next.Status.LoadBalancer.Ingress = status
			limited, cancel := context.WithTimeout(ctx, writeTimeout)
			_, err := c.client.NetworkingV1().Ingresses(n.Namespace).UpdateStatus(limited, next, metav1.UpdateOptions{})
			cancel()
			errs = append(errs, ignoreRaces(err))
		}
		c.problems.record(c.o.Events, in, names.IngressNotServed, names.IngressServed, problem)
		c.ignored.record(c.o.Events, in, "IngressAnnotationIgnored", "", ignored)
		c.loops.recorded.record(c.o.Events, in, "IngressRedirectLoop", "", c.loops.at(n, s.Split))
		c.uncertified.record(c.o.Events, in, names.CertificateNotOrdered, "", unordered[n])
	}
	return errors.Join(errs...)
}

// joined returns two texts with a semicolon between.
func joined(a, b string) string {
	if a == "" || b == "" || a == b {
		return cmp.Or(a, b)
	}
	return a + "; " + b
}

// isOf reports whether a Service is the one that is wanted, and not one with its name.
func isOf(have, want *corev1.Service) bool {
	return ours(have) && (len(want.OwnerReferences) == 0 || metav1.GetControllerOf(have).UID == want.OwnerReferences[0].UID)
}

// serviceOfIngresses returns the Service of a front of Ingresses. in is the Ingress that has it for itself, nil for the shared one: its
// annotations about load balancers come over, and cannot replace what makes it the front.
func serviceOfIngresses(n svc.Name, in *networkingv1.Ingress, f *gateway.IngressFront) *corev1.Service {
	ports := map[gateway.PortKey]string{{Number: gateway.IngressHTTP}: "http"}
	if f.Table.Ports[gateway.IngressHTTPS] != nil {
		ports[gateway.PortKey{Number: gateway.IngressHTTPS}] = "https"
	}
	s := front(names.ServiceOfFront(n), ports)
	if in != nil {
		taken, _ := dialect.OfFront(in.Annotations)
		asked, _ := dialect.ParseLoadBalancer(taken, "")
		onlyFamilyOf(s, asked.Addresses)
		var keys []string
		for _, k := range slices.Sorted(maps.Keys(taken)) {
			s.Annotations[k] = taken[k]
			keys = append(keys, keyOfAnnotation+":"+k)
		}
		s.Annotations[svc.FrontKeysAnnotation] = strings.Join(keys, ",")
		owner := metav1.NewControllerRef(in, networkingv1.SchemeGroupVersion.WithKind(kindIngress))
		owner.BlockOwnerDeletion = nil // for that the controller would need another right
		s.OwnerReferences = []metav1.OwnerReference{*owner}
	}
	s.Labels[names.FrontLabel] = names.FrontIngress
	open(s, trust.SecretRefs(f.Secrets))
	order(s, f.Orders.In(n.Namespace))
	return s
}

// sameAddress compares two addresses of a status. All Ingresses are compared after each change, which reflection makes costly.
func sameAddress(a, b networkingv1.IngressLoadBalancerIngress) bool {
	return a.IP == b.IP && a.Hostname == b.Hostname && slices.EqualFunc(a.Ports, b.Ports, func(p, q networkingv1.IngressPortStatus) bool {
		return p.Port == q.Port && p.Protocol == q.Protocol && p.Error == nil && q.Error == nil
	})
}

// recorded are the last Events of a kind about Ingresses.
type recorded map[svc.Name]eventText

// eventText is the text of an Event about an object.
type eventText struct {
	of   types.UID
	text string
}

// record records an Event about an Ingress, once for each change of its text. For "" there is none, or a normal one with the reason
// resolved after another text, unless that is empty, too.
func (r recorded) record(events Recorder, in *networkingv1.Ingress, reason, resolved, text string) {
	n, now := svc.NameOf(in), eventText{in.UID, text}
	was := r[n]
	if was == now {
		return
	}
	switch r[n] = now; {
	case text != "":
		events.Event(in, corev1.EventTypeWarning, reason, text)
	case resolved != "" && was.of == now.of && was.text != "":
		events.Event(in, corev1.EventTypeNormal, resolved, "all of its paths and hosts are served")
	}
}

// keep forgets the Ingresses that are gone.
func (r recorded) keep(have map[svc.Name]*networkingv1.Ingress) {
	for n := range r {
		if have[n] == nil {
			delete(r, n)
		}
	}
}

// onlyFamilyOf has a Service take addresses of one family if all that are asked for are of that, as a Gateway does.
func onlyFamilyOf(s *corev1.Service, asked []netip.Addr) {
	if len(asked) != 1 {
		return
	}
	family := corev1.IPv6Protocol
	if asked[0].Is4() {
		family = corev1.IPv4Protocol
	}
	s.Spec.IPFamilyPolicy, s.Spec.IPFamilies = new(corev1.IPFamilyPolicySingleStack), []corev1.IPFamily{family}
}
