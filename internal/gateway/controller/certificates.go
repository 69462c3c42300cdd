package controller

import (
	"cmp"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/gateway"
	"github.com/fairlead/fairlead/internal/gateway/certificates"
	"github.com/fairlead/fairlead/internal/gateway/names"
	"github.com/fairlead/fairlead/internal/gateway/watch"
	"github.com/fairlead/fairlead/internal/lb/acme"
	"github.com/fairlead/fairlead/internal/svc"
)

// noAuthority is why nothing orders a certificate.
const noAuthority = "no authority is configured (--lb-acme-directory)"

// certifier has certificates ordered, and knows their conditions.
type certifier struct {
	orders  *acme.Manager       // nil without ACME
	ordered map[svc.Name]string // by Secret, the front that has its certificate ordered
}

// orderedBy returns the Secrets that the Service of a ListenerSet names as ordered.
func orderedBy(f *gateway.Front, set svc.Name) (out []svc.Name) {
	for _, o := range f.Orders.All() {
		if o.Kind == kindSet && o.Of == set {
			out = append(out, o.Secret)
		}
	}
	return out
}

// request has the certificates ordered that fronts want. services are the ones that there are: one that does not name a Secret yet gives
// no right to write it, and one without an address leads no authority here.
func (c *certifier) request(s *watch.State, services map[svc.Name]*corev1.Service) {
	var all []acme.Request
	c.ordered = map[svc.Name]string{}
	add := func(by string, have *corev1.Service, orders []certificates.Order) {
		for i := range orders {
			o := &orders[i]
			if owner := c.ordered[o.Secret]; owner != "" && owner != by {
				continue
			}
			c.ordered[o.Secret] = by
			addresses := addressesOf(have)
			of := objectOf(s, o)
			if of == nil || o.Answered && len(addresses) == 0 {
				continue
			}
			all = append(all, acme.Request{
				Want:      acme.Want{Hosts: o.Hosts, Secret: o.Secret.Name, Challenge: o.Challenge},
				Namespace: o.Secret.Namespace, Of: of, Addresses: addresses,
			})
		}
	}
	var fronts []svc.Name
	for n, f := range s.Fronts {
		if !f.Orders.Empty() {
			fronts = append(fronts, n)
		}
	}
	slices.SortFunc(fronts, svc.Name.Compare)
	for _, n := range fronts {
		have := services[names.ServiceOfGateway(n)]
		if g := s.Gateways[n]; have != nil && (g == nil || !isHeldBy(have, kindGateway, g)) {
			continue // at the addresses of another object nobody would answer
		}
		add(n.String(), have, s.Fronts[n].Orders.All())
	}
	for _, n := range slices.SortedFunc(maps.Keys(s.IngressFronts), svc.Name.Compare) {
		f, service := s.IngressFronts[n], names.ServiceOfFront(n)
		if have := services[service]; f.Orders.Empty() || have != nil && !isOf(have, serviceOfIngresses(n, s.Split.Ingresses(n)[n], f)) {
			continue // at the addresses of another front nobody would answer
		}
		add(frontOfIngresses(n), services[service], f.Orders.All())
	}
	if c.orders != nil {
		c.orders.SetRequests(all)
	}
}

// objectOf returns what Events about a certificate are about, nil if it has gone.
func objectOf(s *watch.State, o *certificates.Order) runtime.Object {
	var of metav1.Object
	switch o.Kind {
	case kindGateway:
		if g := s.Gateways[o.Of]; g != nil {
			of = g
		}
	case kindSet:
		if set := s.Sets[o.Of]; set != nil {
			of = set
		}
	default:
		if in := s.Ingresses[o.Of]; in != nil {
			return in
		}
	}
	if of == nil {
		return nil
	}
	return &corev1.ObjectReference{
		APIVersion: gwv1.GroupVersion.String(), Kind: o.Kind, Namespace: o.Of.Namespace, Name: o.Of.Name, UID: of.GetUID(),
		ResourceVersion: of.GetResourceVersion(),
	}
}

// certificate returns the condition of a listener whose certificate is ordered.
func (c *certifier) certificate(o gateway.Ordered, front svc.Name, addressed bool) metav1.Condition {
	out := metav1.Condition{Type: names.ConditionCertificate, Status: metav1.ConditionFalse}
	by := c.ordered[o.Secret]
	switch {
	case o.Problem != "":
		out.Reason, out.Message = "Invalid", o.Problem
	case c.orders == nil:
		out.Reason, out.Message = "NoAuthority", noAuthority
	case by != "" && by != front.String():
		out.Reason, out.Message = "OrderedElsewhere", "the certificate of Secret "+o.Secret.Name+" is ordered for "+by
	default:
		state := c.orders.StateOf(o.Secret)
		out.Reason, out.Message = cmp.Or(state.Reason, acme.Awaited), cmp.Or(state.Text, "the certificate is being ordered")
		if state == (acme.State{}) && !addressed {
			out.Message = "the certificate is ordered once there is an address at which the authority can ask"
		}
		if state.Issued {
			out.Status = metav1.ConditionTrue
		}
	}
	return out
}

// certify adds the conditions of certificates to the status of a Gateway.
func (c *certifier) certify(s *gwv1.GatewayStatus, f *gateway.Front, generation int64, addressed bool) {
	c.certifyListeners(&s.Conditions, s.Listeners, f, svc.Name{}, generation, addressed)
}

// certifySet is certify for a ListenerSet.
func (c *certifier) certifySet(s *gwv1.ListenerSetStatus, f *gateway.Front, set svc.Name, generation int64, addressed bool) {
	listeners := ofSet(s).Listeners
	c.certifyListeners(&s.Conditions, listeners, f, set, generation, addressed)
	for i := range listeners {
		s.Listeners[i].Conditions = listeners[i].Conditions
	}
}

func (c *certifier) certifyListeners(
	whole *[]metav1.Condition, listeners []gwv1.ListenerStatus, f *gateway.Front, set svc.Name, generation int64, addressed bool,
) {
	ordered := gateway.OrderedOf(f, set)
	if len(ordered) == 0 {
		return
	}
	all := metav1.Condition{
		Type: names.ConditionCertificate, Status: metav1.ConditionTrue, Reason: "Issued", ObservedGeneration: generation,
		Message: "the certificates of all listeners that have theirs ordered are issued",
	}
	for i := range listeners {
		l := &listeners[i]
		o, asks := ordered[l.Name]
		if !asks {
			continue
		}
		one := c.certificate(o, f.Name(), addressed)
		one.ObservedGeneration = generation
		l.Conditions = append(l.Conditions, one)
		if one.Status != metav1.ConditionTrue && all.Status == metav1.ConditionTrue {
			all.Status, all.Reason, all.Message = one.Status, one.Reason, "listener "+string(l.Name)+": "+one.Message
		}
	}
	*whole = append(*whole, all)
}

// frontOfIngresses is what certifier.ordered has for a front of Ingresses. Gateways have their names.
func frontOfIngresses(n svc.Name) string {
	if n == names.SharedFront() {
		return "the Ingresses at " + names.IngressService().String()
	}
	return "Ingress " + n.String()
}

// unordered returns why the certificates of the Ingresses of a front are not ordered at all, by the names of the Ingresses that ask for
// them. An order has Events itself.
func (c *certifier) unordered(front svc.Name, orders *certificates.Set) map[svc.Name]string {
	out := map[svc.Name]string{}
	for _, o := range orders.All() {
		if out[o.Of] != "" {
			continue
		}
		if c.orders == nil {
			out[o.Of] = "Secret " + o.Secret.Name + ": " + noAuthority
		} else if by := c.ordered[o.Secret]; by != "" && by != frontOfIngresses(front) {
			if !strings.Contains(by, " ") {
				by = "Gateway " + by
			}
			out[o.Of] = "Secret " + o.Secret.Name + ": its certificate is ordered for " + by
		}
	}
	return out
}
