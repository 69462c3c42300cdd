package dialect

import (
	"net/netip"
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
	// service.beta.kubernetes.io/port_80_health-probe_interval and its like, of one port.
	d.Annotations = append(d.Annotations, later("service.beta.kubernetes.io/port_*", "any", FieldHealthInterval,
		"health checks are the same for all ports: use the annotation without port_N_"))
	return d
}
