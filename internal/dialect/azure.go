package dialect

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"
)

const azurePrefix = "service.beta.kubernetes.io/azure-"

func azureDialect() Dialect {
	const (
		noResources = "there are no resource groups, subnets and public IP objects of Azure; addresses come from IPAddressPools"
		noPLS       = "there is no Private Link"
		lb          = azurePrefix + "load-balancer-"
		pls         = azurePrefix + "pls-"
		pip         = azurePrefix + "pip-"
	)
	d := Dialect{
		Name: "Azure", Source: "https://cloud-provider-azure.sigs.k8s.io/topics/loadbalancer/",
		Prefixes: []string{azurePrefix, "service.beta.kubernetes.io/port_"},
		Annotations: []Annotation{
			internal(lb+"internal", "109", []string{"true"}, []string{"false"}),
			none(lb+"internal-subnet", noResources), none(lb+"mode", "there is one load balancer for each Service"),
			none(lb+"configurations", "there is one load balancer for each Service"),
			none(lb+"resource-group", noResources), addresses(lb+"ipv4", 4), addresses(lb+"ipv6", 6),
			none(azurePrefix+"dns-label-name", "no zone is delegated; ExternalDNS writes names of Services"),
			none(azurePrefix+"shared-securityrule", "there are no security groups of Azure"),
			none(azurePrefix+"allowed-service-tags", "service tags are of Azure's networks; use spec.loadBalancerSourceRanges"),
			prefixes(azurePrefix+"allowed-ip-ranges", FieldSourceRanges, func(s *Spec, p []netip.Prefix) { s.SourceRanges = p }),
			none(azurePrefix+"deny-all-except-load-balancer-source-ranges", "that is how spec.loadBalancerSourceRanges works"),
			number(lb+"tcp-idle-timeout", 4, 100, "minutes", FieldIdleTimeout,
				func(s *Spec, n int) { s.IdleTimeout = Duration(time.Duration(n) * time.Minute) }),
			none(lb+"disable-tcp-reset", "silent connections are closed in order"),
			none(lb+"enable-high-availability-ports", "each port of a Service is given"),
			none(azurePrefix+"disable-load-balancer-floating-ip", "Pods get connections at their own addresses"),
			none(azurePrefix+"additional-public-ips", "use spec.externalIPs"),
			none(azurePrefix+"pip-name", noResources), none(azurePrefix+"pip-name-ipv6", noResources), none(pip+"prefix-id", noResources),
			none(pip+"prefix-id-ipv6", noResources), none(pip+"ip-tags", noResources), tags(pip + "tags"),
			word(lb+"health-probe-protocol", map[string]Protocol{"tcp": TCP, "http": HTTP, "https": HTTPS}, FieldHealthProtocol, TCP, setHealth),
			seconds(lb+"health-probe-interval", 5, 120, FieldHealthInterval, setInterval),
			number(lb+"health-probe-num-of-probe", 1, 20, "", FieldHealthUnhealthy, setUnhealthy),
			path(lb + "health-probe-request-path"),
		},
	}
	for _, key := range []string{"create", "name", "resource-group", "ip-configuration-subnet", "ip-configuration-ip-address-count",
		"ip-configuration-ip-address", "fqdns", "proxy-protocol", "visibility", "auto-approval"} {
		d.Annotations = append(d.Annotations, none(pls+key, noPLS))
	}
	d.Annotations = append(d.Annotations, azurePort())
	return d
}

// azurePortPrefix begins annotations of one port: service.beta.kubernetes.io/port_80_health-probe_interval and its like.
const azurePortPrefix = "service.beta.kubernetes.io/port_"

// azurePort returns the annotations of one port. Those of health checks have an effect if it is the only one of the Service:
// checks are the same for all ports.
func azurePort() Annotation {
	probes := map[string]Annotation{}
	for _, a := range []Annotation{
		word("protocol", map[string]Protocol{"tcp": TCP, "http": HTTP, "https": HTTPS}, FieldHealthProtocol, TCP, setHealth),
		number("port", 1, 65535, "", FieldHealthPort, setHealthPort),
		seconds("interval", 5, 120, FieldHealthInterval, setInterval),
		number("num-of-probe", 1, 20, "", FieldHealthUnhealthy, setUnhealthy),
		path("request-path"),
	} {
		probes[a.Key] = a
	}
	return Annotation{
		Key:    azurePortPrefix + "*",
		Values: "N_health-probe_protocol, _port, _interval, _num-of-probe, _request-path; N_no_lb_rule; N_no_probe_rule",
		Sets:   []Field{FieldHealthProtocol, FieldHealthPort, FieldHealthInterval, FieldHealthUnhealthy, FieldHealthPath},
		read: func(r *reader, v string) error {
			text, what, _ := strings.Cut(strings.TrimPrefix(r.key, azurePortPrefix), "_")
			port, err := strconv.ParseUint(text, 10, 16)
			if err != nil {
				return fmt.Errorf("%q is not a port", shorten(text))
			}
			a, probes := probes[strings.TrimPrefix(what, "health-probe_")]
			switch has := slices.ContainsFunc(r.service.Ports, func(p Port) bool { return p.Number == uint16(port) }); {
			case !has:
				r.found(Meaningless, r.key, v, fmt.Sprintf("accepted; has no meaning here because the Service has no port %d", port))
			case probes && len(r.service.Ports) == 1:
				return a.read(r, v)
			case probes:
				r.found(NotYet, r.key, v,
					"health checks are the same for all ports: use the annotation without port_N_, or a Service for each port")
			case what == "no_lb_rule" || what == "no_probe_rule":
				r.found(NotYet, r.key, v, "each port of the Service is served, and checked: use another Service for that one")
			default:
				r.found(Unknown, r.key, v, fmt.Sprintf("%s is no annotation of Azure", shorten(r.key)))
			}
			return nil
		}}
}
