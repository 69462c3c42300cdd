package dialect

import (
	"net/netip"
	"slices"
	"time"
)

// Spec is what a Service asks of its load balancer, in terms that belong to no cloud.
type Spec struct {
	LoadBalancer
	// Listeners has one for each port of the Service, in its order.
	Listeners []Listener `json:"listeners"`
	// Certificates are the names of TLS Secrets in the Service's namespace; the first is the
	// default, the others serve the names that they are for (SNI).
	Certificates []string   `json:"certificates,omitempty"`
	BackendTLS   BackendTLS `json:"backendTLS,omitzero"`
	// ACMEHosts are the names that the first of Certificates is ordered for, by ACME. Without any it is given.
	ACMEHosts []string `json:"acmeHosts,omitempty"`
	// ACMEChallenge is HTTP01 or DNS01, empty for TLSALPN01.
	ACMEChallenge string `json:"acmeChallenge,omitempty"`
	// TLSPolicy is the name of a policy that TLSVersions knows, empty for the default.
	TLSPolicy string `json:"tlsPolicy,omitempty"`
	// ALPN are the protocols that a TLS listener offers, the preferred one first.
	ALPN []string `json:"alpn,omitempty"`
	// ProxyProtocol is the version of the PROXY protocol that is sent to Pods, 0 for none.
	ProxyProtocol int `json:"proxyProtocol,omitempty"`
	// TrustedFronts are the networks of fronts whose PROXY protocol is believed. From
	// others none is expected.
	TrustedFronts []netip.Prefix `json:"trustedFronts,omitempty"`
	// NLB asks for the defaults of a Network Load Balancer, and for its rules on the nodes (behaviour 141).
	NLB bool `json:"nlb,omitempty"`
	// SourceRanges are the networks of clients that may connect; all if there are none.
	SourceRanges []netip.Prefix `json:"sourceRanges,omitempty"`
	// IdleTimeout ends a connection on which nothing was sent for that time.
	IdleTimeout Duration `json:"idleTimeout"`
	// RequestTimeout is how long a Pod has for the first byte of an answer of HTTP, once the request was sent.
	RequestTimeout Duration `json:"requestTimeout,omitempty"`
	// DrainTimeout is how long connections to a Pod that leaves may go on, 0 for as long
	// as they like.
	DrainTimeout Duration `json:"drainTimeout,omitempty"`
	// Draining is false if connections to a Pod that leaves are to end at once.
	Draining bool `json:"draining"`
	// Balance chooses a Pod for a connection.
	Balance Balance `json:"balance"`
	// SlowStart is the time in which the share of a Pod that comes, or comes back, grows to
	// a whole one; 0 for at once.
	SlowStart Duration `json:"slowStart,omitempty"`
	// WeightLabel is the label of Nodes whose value is the weight of their Pods, empty if
	// all weigh the same.
	WeightLabel string `json:"weightLabel,omitempty"`
	Sticky      Sticky `json:"sticky,omitzero"`
	Eject       Eject  `json:"eject,omitzero"`
	// Clients has the conditions and limits for clients, Headers the changes to fields of requests.
	Clients Clients `json:"clients,omitzero"`
	Headers Headers `json:"headers,omitzero"`
	// Compress are the content codings of answers, the best first; empty for none.
	Compress []string `json:"compress,omitempty"`
	// CrossZone lets Pods of other zones than the node's have connections.
	CrossZone bool   `json:"crossZone"`
	Health    Health `json:"health"`
	// BandwidthMbps limits the bytes sent, in Mbit/s, and ConnectionLimit how many connections are open; 0 for
	// no limit.
	BandwidthMbps   int `json:"bandwidthMbps,omitempty"`
	ConnectionLimit int `json:"connectionLimit,omitempty"`
	// Tags are shown in the status.
	Tags map[string]string `json:"tags,omitempty"`
	// NodePorts is true if connections go to node ports, from which the node's proxy goes on, instead of to Pods.
	NodePorts bool `json:"nodePorts,omitempty"`
	// BackendNodes is a selector of the nodes to which, or to whose Pods, connections go: all without one.
	BackendNodes string `json:"backendNodes,omitempty"`
	// OnlyNodesWithPod leaves out node ports of nodes without a ready Pod, as policy Local does; SkipCordoned
	// node ports of cordoned nodes.
	OnlyNodesWithPod bool      `json:"onlyNodesWithPod,omitempty"`
	SkipCordoned     bool      `json:"skipCordoned,omitempty"`
	AccessLog        AccessLog `json:"accessLog,omitzero"`
}

// Listener is what a load balancer does at one port of its address.
type Listener struct {
	Name string `json:"name,omitempty"`
	Port uint16 `json:"port"`
	// Protocol is what clients speak, and Backend what Pods are spoken to in.
	Protocol Protocol `json:"protocol"`
	Backend  Protocol `json:"backend"`
	// Redirect is the port of https that clients of http are sent to, 0 for none.
	Redirect uint16 `json:"redirect,omitempty"`
}

// Protocol is the protocol of a listener, or of its Pods.
type Protocol string

// The protocols.
const (
	TCP   Protocol = "tcp"
	UDP   Protocol = "udp"
	SCTP  Protocol = "sctp"
	TLS   Protocol = "tls"
	HTTP  Protocol = "http"
	HTTPS Protocol = "https"
	H2C   Protocol = "h2c"
	GRPC  Protocol = "grpc"
)

// Duration is a time.Duration that is written as "10s".
type Duration time.Duration

// Std returns it as the standard library has it.
func (d Duration) Std() time.Duration { return time.Duration(d) }

// String returns it as time.Duration does.
func (d Duration) String() string { return time.Duration(d).String() }

// MarshalText writes it as String does.
func (d Duration) MarshalText() ([]byte, error) { return []byte(d.String()), nil }

// IsTLS reports whether the connection is encrypted.
func (p Protocol) IsTLS() bool { return p == TLS || p == HTTPS }

// IsHTTP reports whether a listener carries requests.
func (p Protocol) IsHTTP() bool { return p == HTTP || p == HTTPS }

// Balance is a way to choose a Pod for a connection.
type Balance string

// The ways to choose.
const (
	RoundRobin       Balance = "round-robin"
	LeastConnections Balance = "least-connections"
	SourceHash       Balance = "source-hash"
	RandomOfTwo      Balance = "random-of-two"
)

// Health is how Pods are checked.
type Health struct {
	Enabled bool `json:"enabled"`
	// Protocol is TCP, HTTP, HTTPS or GRPC.
	Protocol Protocol `json:"protocol"`
	// Port is the one that is asked, 0 for that of the connections.
	Port uint16 `json:"port,omitempty"`
	Path string `json:"path,omitempty"`
	// Host is the host that checks of HTTP ask for, empty for the address, and Method the method, empty for GET.
	Host   string `json:"host,omitempty"`
	Method string `json:"method,omitempty"`
	// Healthy is how many successes in a row bring a Pod in, Unhealthy how many failures take
	// it out.
	Healthy   int      `json:"healthyThreshold"`
	Unhealthy int      `json:"unhealthyThreshold"`
	Interval  Duration `json:"interval"`
	Timeout   Duration `json:"timeout"`
	// Codes are the statuses of HTTP that mean success, as "200-399,401".
	Codes string `json:"codes,omitempty"`
	// FailClosed is true if no Pod has connections while all are bad; else all have.
	FailClosed bool `json:"failClosed,omitempty"`
}

// Eject is when Pods get no clients for some seconds since connections and requests of others have failed.
type Eject struct {
	Off bool `json:"off,omitempty"`
	// Errors is after how many requests in a row with a status of 500 and more, or without an answer; 0: only what cannot be
	// reached is ejected.
	Errors int `json:"errors,omitempty"`
	// Share is which part of the Pods may be ejected at most, in percent; 0 for the default. One may be in any case, if there
	// are others.
	Share int `json:"share,omitempty"`
	// Panic is the part of the Pods, in percent, below which all get clients: so few would not bear the load.
	Panic int `json:"panic,omitempty"`
}

// BackendTLS is how TLS to Pods is verified: not at all without an Authority.
type BackendTLS struct {
	// Authority is the object of the Service's namespace whose entry ca.crt has the certificates that Pods' are
	// verified by: secret/NAME or configmap/NAME.
	Authority string `json:"authority,omitempty"`
	// ServerName is the name that a Pod's certificate must be for.
	ServerName string `json:"serverName,omitempty"`
	// Certificate is the name of a TLS Secret with a certificate of the load balancer's own, for Pods that ask
	// for one.
	Certificate string `json:"certificate,omitempty"`
}

// TLSSecrets returns the names of the TLS Secrets that a Spec needs.
func (s *Spec) TLSSecrets() []string {
	out := slices.Clone(s.Certificates)
	if c := s.BackendTLS.Certificate; c != "" && !slices.Contains(out, c) {
		out = append(out, c)
	}
	return out
}

// Objects returns the Secrets and ConfigMaps that a Spec needs, as secret/NAME and configmap/NAME.
func (s *Spec) Objects() []string {
	var out []string
	for _, n := range s.TLSSecrets() {
		out = append(out, "secret/"+n)
	}
	if s.AccessLog.Uploads() {
		out = append(out, "secret/"+s.AccessLog.Secret)
	}
	for _, a := range s.Authorities() {
		if !slices.Contains(out, a) {
			out = append(out, a)
		}
	}
	return out
}

// Authorities returns the objects with the certificates that verify Pods and clients.
func (s *Spec) Authorities() (out []string) {
	for _, a := range []string{s.BackendTLS.Authority, s.Clients.Authority} {
		if a != "" && !slices.Contains(out, a) {
			out = append(out, a)
		}
	}
	return out
}

// Sticky is how requests of a client stay at the Pod that had the first one.
type Sticky struct {
	// Cookie is true if the load balancer sets a cookie that names the Pod.
	Cookie bool `json:"cookie,omitempty"`
	// Application is the name of a cookie of the Pods': then sessions stick from when
	// a Pod sets it, as long as the client has it.
	Application string `json:"application,omitempty"`
	// Lifetime of the cookie, 0 for that of the client's session.
	Lifetime Duration `json:"lifetime,omitempty"`
}

// Way is how connections reach Pods.
type Way string

// The ways (docs/design/009-proxied-load-balancer.md).
const (
	Direct  Way = "direct"
	Proxied Way = "proxied"
)

// Service is what Read looks at of a Service.
type Service struct {
	Annotations    map[string]string
	LoadBalancerIP string
	// SourceRanges is spec.loadBalancerSourceRanges.
	SourceRanges []string
	// ClientIP is true for spec.sessionAffinity ClientIP.
	ClientIP bool
	Ports    []Port
}

// Port is a port of a Service.
type Port struct {
	Name   string
	Number uint16
	// Protocol is TCP, UDP or SCTP; empty for TCP.
	Protocol string
	// AppProtocol is the one above it, as the Service says; empty if it says nothing.
	AppProtocol string
}

// Reading is what Read found out.
type Reading struct {
	Spec Spec `json:"spec"`
	Way  Way  `json:"way"`
	// Because is why it is the proxied way.
	Because []string `json:"because,omitempty"`
	// Origins has where each field comes from: an annotation, a field of the Service, or
	// a default.
	Origins map[Field]Origin `json:"origins"`
	// Findings has one or more for each annotation that is for a load balancer, and for what
	// this version does not do.
	Findings []Finding `json:"findings"`
	// AddressErr is why the request about the address cannot be understood: which one, or whether an internal one. No
	// address is given then.
	AddressErr error `json:"-"`
}

// Origin is where the value of a field comes from.
type Origin struct {
	From  string `json:"from"`
	Value string `json:"value"`
}

// Finding is what became of an annotation.
type Finding struct {
	State State `json:"state"`
	// Annotation is its key, empty if it is about what several ask for.
	Annotation string `json:"annotation,omitempty"`
	Value      string `json:"value,omitempty"`
	// Field is what it sets, if it sets anything.
	Field Field  `json:"field,omitempty"`
	Text  string `json:"text"`
}

// State is what became of an annotation.
type State string

// The states.
const (
	// Applied has an effect.
	Applied State = "applied"
	// Meaningless is accepted, and has no meaning on machines of one's own.
	Meaningless State = "no-meaning"
	// NotYet is understood, and this version does not do it.
	NotYet State = "not-yet"
	// Unused has no effect in the way that the Service takes.
	Unused State = "unused"
	// Overridden lost against another annotation.
	Overridden State = "overridden"
	// Unknown has the prefix of a known dialect.
	Unknown State = "unknown"
	// Invalid has a wrong value.
	Invalid State = "invalid"
)

// IsWarning reports whether a finding needs attention.
func (s State) IsWarning() bool {
	return s == NotYet || s == Overridden || s == Unknown || s == Invalid
}

// Admits reports whether a client is within the ranges that the Service is for; without any, all clients are.
func (s *Spec) Admits(client netip.Addr) bool {
	return len(s.SourceRanges) == 0 || slices.ContainsFunc(s.SourceRanges, func(p netip.Prefix) bool { return p.Contains(client) })
}

// Invalid reports whether an annotation has a wrong value, so that the last good
// configuration has to go on.
func (r *Reading) Invalid() bool { return r.Wrong() != "" }

// Wrong returns what is wrong with the first annotation that has a wrong value, empty if none has.
func (r *Reading) Wrong() string {
	for _, f := range r.Findings {
		if f.State == Invalid {
			return f.Text
		}
	}
	return ""
}

// Annotations of Services of type LoadBalancer.
const (
	// LBAddresses asks for addresses, comma separated, at most one of each family.
	LBAddresses = lbPrefix + "addresses"
	// LBPool names the IPAddressPool of the Service's addresses.
	LBPool = lbPrefix + "pool"
	// LBSharingKey lets Services with an equal one share an address.
	LBSharingKey = lbPrefix + "sharing-key"
	// LBInternal, "true", asks for an address of an internal pool.
	LBInternal = lbPrefix + "internal"
)

// LoadBalancer is what a Service asks about its address.
type LoadBalancer struct {
	// Addresses are the addresses that it asks for, at most one of each family.
	Addresses []netip.Addr `json:"addresses,omitempty"`
	// Pool is the name of its pool, and SharingKey what it shares an address by; empty
	// for none.
	Pool       string `json:"pool,omitempty"`
	SharingKey string `json:"sharingKey,omitempty"`
	// Internal asks for an internal load balancer.
	Internal bool `json:"internal"`
}
