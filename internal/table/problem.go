package table

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/fairlead/fairlead/internal/svc"
)

// The reasons a Problem can have.
const (
	// ReasonInvalidEndpoint: an endpoint's address cannot be one, or may not be
	// (loopback, unspecified, link-local, multicast; behaviour 24). It is left out.
	ReasonInvalidEndpoint = "InvalidEndpoint"
	// ReasonEndpointIsServiceIP: an endpoint's address is the cluster IP of a
	// Service, which no proxy can send to (behaviour 25). It is left out.
	ReasonEndpointIsServiceIP = "EndpointIsServiceIP"
	// ReasonAddressTaken: another Service has the same address, port and
	// protocol, and keeps it: cluster IPs before all else, then the older
	// Service. This Service is not reachable there.
	ReasonAddressTaken = "AddressTaken"
	// ReasonAddressReserved: an external or load balancer IP of the Service is,
	// with its port, where an API server or this node's agent answers: nodes would
	// send requests for that to the Service (CVE-2020-8554). This Service is not
	// reachable there.
	ReasonAddressReserved = "AddressReserved"
	// ReasonInvalidAddress: a virtual address of the Service is not one. It is
	// left out.
	ReasonInvalidAddress = "InvalidAddress"
	// ReasonInvalidHostIP: the hostIP of a Pod's port is no address of this node, or
	// one from which no packet can be led to a Pod. Nothing leads from it to the Pod.
	ReasonInvalidHostIP = "InvalidHostIP"
	// ReasonInvalidSourceRange: an element of loadBalancerSourceRanges is not a
	// CIDR. It is left out; if none is left, no client is let in.
	ReasonInvalidSourceRange = "InvalidSourceRange"
	// ReasonInvalidPort: a port's number or protocol is not one. The port is
	// left out.
	ReasonInvalidPort = "InvalidPort"
	// ReasonTooManyEndpoints: a port has more than MaxEndpoints of a family. The
	// first of them by address are used.
	ReasonTooManyEndpoints = "TooManyEndpoints"
	// ReasonUnknownScheduler: the Service asks for a scheduler that this node
	// does not have. Endpoints are chosen by the node's default.
	ReasonUnknownScheduler = "UnknownScheduler"
	// ReasonWeightsIgnored: the Service's endpoints have different weights, and the
	// mode chooses evenly.
	ReasonWeightsIgnored = "WeightsIgnored"
	// ReasonForwardingIgnored: the Service asks for direct return, and this node cannot pass its packets on.
	ReasonForwardingIgnored = "ForwardingIgnored"
)

// Problem is something in a Service or its EndpointSlices that cannot be
// carried out as written. The rest of the Service, and every other Service, is
// not affected by it.
type Problem struct {
	// Service is its name, or that of a Pod with host ports (PodName).
	Service svc.Name
	Reason  string
	Message string
}

// String returns "namespace/name: Reason: message".
func (p Problem) String() string {
	return p.Service.String() + ": " + p.Reason + ": " + p.Message
}

func compareProblems(a, b Problem) int {
	if c := a.Service.Compare(b.Service); c != 0 {
		return c
	}
	if c := strings.Compare(a.Reason, b.Reason); c != 0 {
		return c
	}
	return strings.Compare(a.Message, b.Message)
}

// maxNamed bounds how many addresses a message names.
const maxNamed = 3

// complaints collects the addresses that have the same thing wrong with them,
// so that a Service with thousands of bad endpoints has one Problem.
type complaints struct {
	service  svc.Name
	problems []Problem
	byReason map[string][]string
}

func (c *complaints) add(reason, format string, args ...any) {
	p := Problem{Service: c.service, Reason: reason, Message: fmt.Sprintf(format, args...)}
	if !slices.Contains(c.problems, p) {
		c.problems = append(c.problems, p)
	}
}

// gather adds what to the list of reason; list turns lists into Problems.
func (c *complaints) gather(reason, what string) {
	if c.byReason == nil {
		c.byReason = map[string][]string{}
	}
	if !slices.Contains(c.byReason[reason], what) {
		c.byReason[reason] = append(c.byReason[reason], what)
	}
}

// fit returns what of a sorted list a frontend can have.
func (c *complaints) fit(k Key, list []Endpoint) []Endpoint {
	if len(list) <= MaxEndpoints {
		return list
	}
	c.add(ReasonTooManyEndpoints, "port %q has more than %d %s endpoints; the first of them by address are used",
		k.ID.Port, MaxEndpoints, k.Family)
	return list[:MaxEndpoints:MaxEndpoints]
}

// done returns the Problems in order, nil if there are none.
func (c *complaints) done() []Problem {
	for reason, all := range c.byReason {
		slices.Sort(all)
		text := strings.Join(all[:min(len(all), maxNamed)], ", ")
		if more := len(all) - maxNamed; more > 0 {
			text += fmt.Sprintf(" and %d more", more)
		}
		c.add(reason, "endpoints left out: %s", text)
	}
	slices.SortFunc(c.problems, compareProblems)
	return c.problems
}

// badEndpoint returns why a may not be an endpoint, or "" (behaviour 24).
func badEndpoint(a netip.Addr) string {
	switch {
	case a.IsUnspecified():
		return "unspecified"
	case a.IsLoopback():
		return "loopback"
	case a.IsLinkLocalUnicast():
		return "link-local"
	case a.IsMulticast():
		return "multicast"
	}
	return ""
}
