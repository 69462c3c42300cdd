package dialect

import (
	"fmt"
	"maps"
	"strings"
)

// alibabaName is the name of the dialect.
const alibabaName = "Alibaba Cloud"

func alibabaDialect() Dialect {
	d := Dialect{
		Name: alibabaName,
		Source: "https://www.alibabacloud.com/help/en/ack/ack-managed-and-ack-dedicated/user-guide/" +
			"add-annotations-to-the-yaml-file-of-a-service-to-configure-clb-instances",
		Prefixes: []string{"service.beta.kubernetes.io/alibaba-cloud-loadbalancer-", "service.beta.kubernetes.io/alicloud-loadbalancer-"},
	}
	for _, prefix := range d.Prefixes { // of today, and of before
		d.Annotations = append(d.Annotations, alibabaAnnotations(prefix)...)
	}
	d.Annotations = append(d.Annotations, backends("service.beta.kubernetes.io/backend-type", "eni", "ecs").of("179, 184"))
	return d
}

// isAlibaba reports whether an annotation is one of Alibaba Cloud.
func isAlibaba(key string) bool {
	d := ownerOf(key)
	return d != nil && d.Name == alibabaName
}

const (
	noClientCA  = "without " + lbPrefix + "client-ca, clients would need no certificate: the Service is not served"
	noACLStatus = "with on, and no spec.loadBalancerSourceRanges, everybody could connect: the Service is not served"
	noACL       = "every client that spec.loadBalancerSourceRanges admits may connect: write the list there"
)

// aclOf returns an annotation of Alibaba's access control lists, which do not exist here. It is never silent about who may
// connect: see finishAlibaba.
func aclOf(key string) Annotation { return later(key, "any", FieldSourceRanges, noACL) }

// aclStatus is aclOf for the one that turns the list on.
func aclStatus(key string) Annotation {
	a := later(key, "any", FieldSourceRanges, noACLStatus)
	a.Values = "on, off"
	warn := a.read
	a.read = func(r *reader, v string) error {
		switch v {
		case "on":
			return warn(r, v)
		case "off":
			r.aclOff = true
			r.same(FieldSourceRanges, "all")
			return nil
		}
		return fmt.Errorf("%q is neither on nor off", shorten(v))
	}
	return a
}

// finishAlibaba decides about what restricts clients by means that do not exist here. Unless the Service restricts them by ours,
// it is not served: everybody could connect.
func (r *reader) finishAlibaba() {
	for i := range r.Findings {
		f := &r.Findings[i]
		if f.State != NotYet || !isAlibaba(f.Annotation) {
			continue
		}
		wrong := func(field Field, why string) {
			f.State, f.Field, f.Text = Invalid, field, fmt.Sprintf("annotation %s: %s", f.Annotation, why)
		}
		needless := func(because string) {
			f.State, f.Text = Meaningless, "accepted; has no meaning here because "+because
		}
		_, name, _ := strings.Cut(f.Annotation, "-loadbalancer-")
		list, authority := strings.HasPrefix(name, "acl-"), strings.HasPrefix(name, "cacert")
		switch {
		case list && len(r.service.SourceRanges) > 0:
			needless("spec.loadBalancerSourceRanges says who may connect")
		case list && r.aclOff && name != "acl-status":
			needless("the access control list is off")
		case name == "acl-status":
			wrong(FieldSourceRanges, noACLStatus)
		case authority && r.Spec.Clients.Authority != "":
			needless(lbPrefix + "client-ca says which certificates clients need")
		case authority:
			wrong(FieldClientCA, noClientCA)
		}
	}
}

// alibabaCertificates returns the annotation with the identifier of a certificate. Those have a "_", which no name of a Secret has.
func alibabaCertificates(key string) Annotation {
	a := certificates(key, "the name of a TLS Secret of the namespace; for an identifier as 123_cn-hangzhou the name with - in place of _")
	named := a.read
	a.read = func(r *reader, v string) error { return named(r, strings.ReplaceAll(v, "_", "-")) }
	return a
}

// alibabaAnnotations are the annotations of cloud-provider-alibaba-cloud, pkg/controller/service/reconcile/annotation.
func alibabaAnnotations(prefix string) []Annotation {
	const (
		noVSwitch = "there are no vSwitches, zones and instances of Alibaba Cloud; addresses come from IPAddressPools"
		noBilling = "it is not billed"
	)
	protocol := map[string]Protocol{"tcp": TCP, "http": HTTP, "https": HTTPS, "tcpssl": TLS}
	onlyUDP := maps.Clone(protocol)
	onlyUDP["udp"] = "" // is known from the Service
	a := func(key string) string { return prefix + key }
	noted := func(why string, keys ...string) (out []Annotation) {
		for _, k := range keys {
			out = append(out, none(a(k), why))
		}
		return out
	}
	out := []Annotation{
		internal(a("address-type"), "114", []string{"intranet"}, []string{"internet"}),
		sharedBy(a("id")).of("177"),
		tags(a("additional-resource-tags")),
		alibabaCertificates(a("cert-id")),
		redirects(a("forward-port"), ":"),
		healthHost(a("health-check-domain"), "$_ip"),
		healthMethod(a("health-check-method")),
		aclOf(a("acl-id")), aclOf(a("acl-type")), aclStatus(a("acl-status")),
		later(a("cacert-id"), "any", FieldClientCA, noClientCA), later(a("cacert"), "any", FieldClientCA, noClientCA),
		protocols(a("protocol-port"), FieldProtocol, ":", true, onlyUDP, func(r *rawListeners) *perPort { return &r.protocol }),
		seconds(a("idle-timeout"), 1, 60, FieldIdleTimeout, setIdle),
		seconds(a("established-timeout"), 10, 900, FieldIdleTimeout, setIdle),
		seconds(a("request-timeout"), 1, 180, FieldRequestTimeout, setRequest),
		tlsPolicy(a("tls-cipher-policy"), ""),
		word(a("scheduler"), map[string]Balance{"wrr": RoundRobin, "rr": RoundRobin, "wlc": LeastConnections, "sch": SourceHash,
			"tch": SourceHash},
			FieldBalance, "", setBalance),
		word(a("connection-drain"), map[string]bool{"on": true, "off": false}, FieldDraining, true, setDraining),
		seconds(a("connection-drain-timeout"), 10, 900, FieldDrainTimeout, setDrain),
		number(a("bandwidth"), 1, 5000, "Mbit/s", FieldBandwidth, setBandwidth),
		addresses(a("ip"), 0),
		word(a("proxy-protocol"), map[string]int{"on": 2, "off": 0}, FieldProxyProtocol, 0, func(s *Spec,
			v int) {
			s.ProxyProtocol = v
		}).of("173"),
		word(a("health-check-switch"), map[string]bool{"on": true, "off": false}, FieldHealthEnabled, true, setChecked),
		word(a("health-check-flag"), map[string]bool{"on": true, "off": false}, FieldHealthEnabled, true, setChecked),
		word(a("health-check-type"), map[string]Protocol{"tcp": TCP, "http": HTTP}, FieldHealthProtocol, TCP, setHealth),
		path(a("health-check-uri")),
		number(a("health-check-connect-port"), 1, 65535, "", FieldHealthPort, setHealthPort),
		number(a("healthy-threshold"), 2, 10, "", FieldHealthHealthy, setHealthy),
		number(a("unhealthy-threshold"), 2, 10, "", FieldHealthUnhealthy, setUnhealthy),
		seconds(a("health-check-interval"), 1, 50, FieldHealthInterval, setInterval),
		seconds(a("health-check-connect-timeout"), 1, 300, FieldHealthTimeout, setTimeout),
		seconds(a("health-check-timeout"), 1, 300, FieldHealthTimeout, setTimeout),
		codes(a("health-check-httpcode"), "http_2xx and its like, with commas between"),
		word(a("sticky-session"), map[string]bool{"on": true, "off": false}, FieldStickyCookie, false, setSticky),
		{Key: a("sticky-session-type"), Values: "insert, server", Sets: []Field{FieldStickyCookie}, read: readStickyType},
		cookieName(a("cookie"), false),
		seconds(a("cookie-timeout"), 1, maxCookieLife, FieldStickyLifetime, setStickyLifetime),
		{Key: a("persistence-timeout"), Values: "0 to 3600 seconds", Sets: []Field{FieldBalance}, read: func(r *reader, v string) error {
			n, err := parseNumber(v, 0, 3600, "seconds")
			if err == nil && n > 0 {
				r.set(FieldBalance, string(SourceHash), func(s *Spec) { s.Balance = SourceHash })
			}
			return err
		}},
		nodeSelector(a("backend-label"), "key=value pairs with commas between"),
		word(a("remove-unscheduled-backend"), map[string]bool{"on": true, "off": false}, FieldSkipCordoned, false,
			func(s *Spec, on bool) { s.SkipCordoned = on }),
		later(a("cps"), "new connections a second", FieldConnections, "the rate of new connections has no limit"),
		forwarded(a("xforwardedfor-proto"), "X-Forwarded-Proto", "on", "off"),
		forwarded(a("xforwardedfor-slbport"), "X-Forwarded-Port", "on", "off"),
		word(a("xforwardedfor-clientsrcport"), map[string]bool{"on": true, "off": false}, FieldClientPort, false, func(*Spec, bool) {}),
		word(a("http2-enabled"), map[string]bool{"on": true, "off": false}, FieldALPN, true,
			func(s *Spec, on bool) { s.ALPN = []string{"http/1.1", "http/1.0"} }),
	}
	out = append(out, noted(noVSwitch, "vswitch-id", "slb-network-type", "master-zoneid", "slave-zoneid", "zone-maps", "security-group-ids",
		"resource-group-id", "external-ip-type", "vgroup-port", "network-type")...)
	out = append(out, noted(noBilling, "charge-type", "instance-charge-type", "spec", "bandwidth-package-id")...)
	out = append(out, noted("the load balancer is the Service's own and goes with it", "name", "delete-protection", "modification-protection",
		"force-override-listeners")...)
	out = append(out, noted("spec.ipFamilies says it", "ip-version", "backend-ip-version")...)
	out = append(out, noted("it is of server groups that load balancers share", "weight", "server-group-type")...)
	out = append(out, noted("it is of Alibaba Cloud's network", "preserve-client-ip", "ppv2-pvl-ep-id-enabled", "ppv2-pvl-eps-id-enabled",
		"ppv2-pvl-vpc-id-enabled")...)
	out = append(out, noted("the status has the address: make a DNS record of the name for it", "hostname")...)
	return out
}
