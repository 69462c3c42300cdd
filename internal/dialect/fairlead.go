package dialect

import (
	"fmt"
	"slices"
)

// lbPrefix begins our own annotations.
const lbPrefix = "fairlead.dev/lb-"

// Our own annotations that errors name, or fronts of Gateways have.
const (
	// LBTLSSecrets names TLS Secrets.
	LBTLSSecrets = lbPrefix + "tls-secrets"
	// LBProtocol is the protocol of clients.
	LBProtocol = lbPrefix + lbProtocol
	lbProtocol = "protocol"
	// LBCompress are the content codings of answers. Ingresses have it, too.
	LBCompress = lbPrefix + "compress"
	// LBIdleTimeout is how many seconds a connection may be idle.
	LBIdleTimeout = lbPrefix + "idle-timeout"
	// LBHealthCheck turns checks of endpoints on or off.
	LBHealthCheck = lbPrefix + "health-check"
)

func fairleadDialect() Dialect {
	protocol := map[string]Protocol{"tcp": TCP, "tls": TLS, "http": HTTP, "https": HTTPS}
	backend := map[string]Protocol{"tcp": TCP, "tls": TLS, "http": HTTP, "https": HTTPS, "h2c": H2C}
	fieldOf := func(to string, at func(*rawListeners) *perPort, f Field, words map[string]Protocol) Annotation {
		return protocols(lbPrefix+to, f, "=", false, words, at)
	}
	return Dialect{
		Name: "fairlead", Source: "https://kubernetes.io/docs/concepts/services-networking/service/#loadbalancer", Prefixes: []string{lbPrefix},
		Annotations: append([]Annotation{
			addresses(LBAddresses, 0),
			text(LBPool, "the name of an IPAddressPool", FieldPool, func(s *Spec, v string) { s.Pool = v }),
			text(LBSharingKey, "any; Services of a namespace with the same one share an address", FieldSharingKey,
				func(s *Spec, v string) { s.SharingKey = v }),
			internal(LBInternal, "106", []string{"true"}, []string{"false"}),
			fieldOf(lbProtocol, func(r *rawListeners) *perPort { return &r.protocol }, FieldProtocol, protocol),
			fieldOf("backend-protocol", func(r *rawListeners) *perPort { return &r.backend }, FieldBackend, backend),
			certificates(LBTLSSecrets, "names of TLS Secrets of the namespace with commas between; the first is the default"),
			acmeHosts(),
			acmeChallenge(),
			tlsPolicy(lbPrefix+"tls-policy", ""),
			alpnPolicy(lbPrefix + "alpn-policy"),
			word(lbPrefix+"proxy-protocol", map[string]int{"v1": 1, "v2": 2, "none": 0}, FieldProxyProtocol, 0,
				func(s *Spec, v int) { s.ProxyProtocol = v }).of("173"),
			prefixes(lbPrefix+"trusted-fronts", FieldTrustedFronts, setTrusted),
			seconds(LBIdleTimeout, 1, 86400, FieldIdleTimeout, setIdle),
			seconds(lbPrefix+"request-timeout", 1, 86400, FieldRequestTimeout, setRequest),
			flag(lbPrefix+"draining", FieldDraining, true, setDraining),
			seconds(lbPrefix+"drain-timeout", 1, 3600, FieldDrainTimeout, setDrain),
			word(lbPrefix+"balance", map[string]Balance{
				"round-robin": RoundRobin, "least-connections": LeastConnections, "source-hash": SourceHash, "random-of-two": RandomOfTwo,
			}, FieldBalance, "", setBalance),
			{Key: lbPrefix + "backend-ca", Sets: []Field{FieldBackendCA}, read: readBackendCA,
				Values: "secret/NAME or configmap/NAME, of the namespace, whose entry ca.crt verifies the certificates of Pods"},
			{Key: lbPrefix + "backend-server-name", Sets: []Field{FieldBackendName}, read: readServerName,
				Values: "the name that certificates of Pods are for; SERVICE.NAMESPACE.svc without it"},
			{Key: lbPrefix + "backend-client-secret", Sets: []Field{FieldBackendCert}, read: readClientSecret,
				Values: "the name of a TLS Secret of the namespace, with a certificate for Pods that ask for one"},
			backends(lbPrefix+"backends", "pods", "node-ports"),
			nodeSelector(lbPrefix+"backend-nodes", "a selector of Nodes, as: disk=ssd,zone in (a, b)"),
			seconds(lbPrefix+"slow-start", 1, 3600, FieldSlowStart, setSlowStart),
			text(lbPrefix+"weight-label", "a label of Nodes, whose value is the weight of their Pods: 0 to 256, 1 without it", FieldWeightLabel,
				func(s *Spec, v string) { s.WeightLabel = v }),
			flag(lbPrefix+"sticky-cookie", FieldStickyCookie, false, setSticky),
			cookieName(lbPrefix+"sticky-app-cookie", true),
			seconds(lbPrefix+"sticky-cookie-lifetime", 1, maxCookieLife, FieldStickyLifetime, setStickyLifetime),
			word(lbPrefix+"all-unhealthy", map[string]bool{"open": false, "closed": true}, FieldAllUnhealthy, false,
				func(s *Spec, closed bool) { s.Health.FailClosed = closed }),
			flag(LBHealthCheck, FieldHealthEnabled, true, setChecked),
			word(lbPrefix+"health-protocol", map[string]Protocol{"tcp": TCP, "http": HTTP, "https": HTTPS, "grpc": GRPC}, FieldHealthProtocol, TCP,
				setHealth),
			path(lbPrefix + "health-path"),
			healthHost(lbPrefix+"health-host", ""),
			healthMethod(lbPrefix + "health-method"),
			redirects(lbPrefix+"redirect", "="),
			codes(lbPrefix+"health-codes", "statuses, as 200-399"),
			number(lbPrefix+"health-port", 1, 65535, "", FieldHealthPort, setHealthPort),
			number(lbPrefix+"healthy-threshold", 1, 10, "", FieldHealthHealthy, setHealthy),
			number(lbPrefix+"unhealthy-threshold", 1, 10, "", FieldHealthUnhealthy, setUnhealthy),
			seconds(lbPrefix+"health-interval", 1, 300, FieldHealthInterval, setInterval),
			seconds(lbPrefix+"health-timeout", 1, 60, FieldHealthTimeout, setTimeout),
			eject(lbPrefix + "eject"),
			number(lbPrefix+"connection-limit", 1, 1000000, "connections", FieldConnections, setConnections),
			number(lbPrefix+"bandwidth", 1, 100000, "Mbit/s", FieldBandwidth, setBandwidth),
			tags(lbPrefix + "tags"),
		}, slices.Concat(ourAccessLogs(), ourClients())...),
	}
}

// tlsPolicy returns an annotation with the name of a policy for TLS.
func tlsPolicy(key, behaviour string) Annotation {
	return Annotation{Key: key, Values: "the name of a policy of AWS or Alibaba, or the least version: 1.0, 1.1, 1.2, 1.3",
		Sets:      []Field{FieldTLSPolicy},
		Behaviour: behaviour, read: func(r *reader, v string) error {
			if _, ok := TLSPolicyOf(v); !ok {
				return fmt.Errorf("%q is not one of %s", shorten(v), sortedKeys(tlsPolicies))
			}
			r.set(FieldTLSPolicy, v, func(s *Spec) { s.TLSPolicy = v })
			return nil
		}}
}
