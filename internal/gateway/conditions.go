package gateway

import (
	"cmp"
	"fmt"
	"strconv"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/gateway/names"
	"github.com/fairlead/fairlead/internal/svc"
)

// condition returns a condition without a time, which belongs to who writes it.
func condition[T, R ~string](kind T, is bool, reason R, generation int64, message string) metav1.Condition {
	status := metav1.ConditionFalse
	if is {
		status = metav1.ConditionTrue
	}
	return metav1.Condition{Type: string(kind), Status: status, Reason: string(reason), Message: message, ObservedGeneration: generation}
}

// valueOf returns what a pointer leads to, or a default.
func valueOf[T any](p *T, or T) T {
	if p == nil {
		return or
	}
	return *p
}

// Status returns the status of the Gateway. unprogrammed is why it is not served at its addresses, "" if it is.
func (f *Front) Status(addresses []string, unprogrammed string) gwv1.GatewayStatus {
	programmed, unusable := gwv1.GatewayReasonProgrammed, f.Unusable(addresses)
	switch {
	case f.refused != "":
		programmed, unprogrammed = gwv1.GatewayReasonInvalid, f.refused
	case unusable != "":
		programmed, unprogrammed = gwv1.GatewayReasonAddressNotUsable, cmp.Or(unprogrammed, unusable)
	case unprogrammed != "" && len(addresses) == 0:
		programmed = gwv1.GatewayReasonAddressNotAssigned
	case unprogrammed != "":
		programmed = gwv1.GatewayReasonNoResources
	}
	s := gwv1.GatewayStatus{Conditions: []metav1.Condition{
		condition(gwv1.GatewayConditionAccepted, f.refused == "", f.accepted, f.generation, f.refused),
		condition(gwv1.GatewayConditionProgrammed, unprogrammed == "", programmed, f.generation, unprogrammed),
		f.references(),
	}}
	if f.insecure {
		s.Conditions = append(s.Conditions, condition(gwv1.GatewayConditionInsecureFrontendValidationMode, true,
			gwv1.GatewayReasonConfigurationChanged, f.generation, "clients get in without a certificate that is verified: AllowInsecureFallback"))
	}
	for _, a := range addresses {
		s.Addresses = append(s.Addresses, gwv1.GatewayStatusAddress{Type: new(gwv1.IPAddressType), Value: a})
	}
	for _, l := range f.listeners {
		if l.set == nil {
			s.Listeners = append(s.Listeners, l.status(f.generation, unprogrammed))
		}
	}
	if n := f.attachedSets(); n > 0 || len(f.sets) > 0 {
		s.AttachedListenerSets = &n
	}
	return s
}

// references returns the condition ResolvedRefs of the Gateway, which also sums up the ones of its listeners.
func (f *Front) references() metav1.Condition {
	reason, wrong := f.resolved, f.unresolved
	for _, l := range f.listeners {
		if wrong == "" && l.set == nil && l.unresolved != "" {
			reason, wrong = gwv1.GatewayReasonListenersNotResolved, fmt.Sprintf("listener %s: %s", l.spec.Name, l.unresolved)
		}
	}
	return condition(gwv1.GatewayConditionResolvedRefs, wrong == "", reason, f.generation, wrong)
}

// status returns the status of a route for one of its parents.
func (c *compiled) status(p *gwv1.ParentReference, reason gwv1.RouteConditionReason, message string) gwv1.RouteParentStatus {
	generation := c.from.Object().GetGeneration()
	s := gwv1.RouteParentStatus{
		ParentRef: *p, ControllerName: names.ControllerName,
		Conditions: []metav1.Condition{
			condition(gwv1.RouteConditionAccepted, message == "", reason, generation, message),
			condition(gwv1.RouteConditionResolvedRefs, c.unresolved == "", c.reason, generation, c.unresolved),
		},
	}
	if c.invalid != "" && !c.wholly {
		s.Conditions = append(s.Conditions, condition(gwv1.RouteConditionPartiallyInvalid, true, gwv1.RouteReasonUnsupportedValue, generation,
			c.invalid+"; requests of such a rule are answered with "+strconv.Itoa(refusal(c.from.Kind()))))
	}
	if c.maintained != nil || c.unusual != "" {
		why, reason := cmp.Or(c.unusual, "all requests are answered with 503"), "Maintenance"
		if c.maintained == nil {
			reason = "InvalidValue"
		}
		s.Conditions = append(s.Conditions, condition(names.ConditionMaintenance, c.maintained != nil, reason, generation,
			"annotation "+svc.MaintenanceAnnotation+": "+why))
	}
	return s
}
