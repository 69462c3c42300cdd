package dialect

import "strconv"

// openstackDialect has the annotations of the OpenStack cloud provider.
func openstackDialect() Dialect {
	const (
		prefix = "loadbalancer.openstack.org/"
		noNets = "there are no networks, ports and floating IPs of OpenStack; addresses come from IPAddressPools"
	)
	d := Dialect{
		Name: "OpenStack",
		Source: "https://github.com/kubernetes/cloud-provider-openstack/blob/master/docs/" +
			"openstack-cloud-controller-manager/expose-applications-using-loadbalancer-type-service.md",
		Prefixes: []string{prefix, "service.beta.kubernetes.io/openstack-"},
		Annotations: []Annotation{
			internal("service.beta.kubernetes.io/openstack-internal-load-balancer", "110", []string{"true"}, []string{"false"}),
			addresses(prefix+"load-balancer-address", 0),
			number(prefix+"connection-limit", -1, 1000000, "connections", FieldConnections, func(s *Spec, n int) { s.ConnectionLimit = max(n, 0) }),
			word(prefix+"proxy-protocol", map[string]int{"true": 1, "v1": 1, "v2": 2, "false": 0}, FieldProxyProtocol, 0,
				func(s *Spec, v int) { s.ProxyProtocol = v }).of("173"),
			{Key: prefix + "x-forwarded-for", Values: "true, false", Sets: []Field{FieldHeaders}, read: func(r *reader, v string) error {
				on, err := strconv.ParseBool(v)
				if err == nil && on { // makes a listener of HTTP, as Octavia's controller does
					r.set(FieldHeaders, "X-Forwarded-For", func(*Spec) { r.raw.offered = HTTP })
				} else if err == nil {
					r.same(FieldHeaders, v)
				}
				return err
			}},
			flag(prefix+"enable-health-monitor", FieldHealthEnabled, true, setChecked),
			seconds(prefix+"health-monitor-delay", 1, 300, FieldHealthInterval, setInterval),
			seconds(prefix+"health-monitor-timeout", 1, 60, FieldHealthTimeout, setTimeout),
			number(prefix+"health-monitor-max-retries", 1, 10, "", FieldHealthHealthy, setHealthy),
			number(prefix+"health-monitor-max-retries-down", 1, 10, "", FieldHealthUnhealthy, setUnhealthy),
			certificates(prefix+"default-tls-container-ref", "a reference whose last component is the name of a TLS Secret of the namespace"),
			nodeSelector(prefix+"node-selector", "key=value pairs with commas between"),
			none(prefix+"keep-floatingip", noNets),
		},
	}
	for _, k := range []string{"floating-network-id", "floating-subnet", "floating-subnet-id", "floating-subnet-tags", "class", "subnet-id",
		"member-subnet-id", "network-id", "port-id", "flavor-id", "availability-zone", "load-balancer-id", "hostname"} {
		d.Annotations = append(d.Annotations, none(prefix+k, noNets))
	}
	for _, k := range []string{"timeout-client-data", "timeout-member-connect", "timeout-member-data", "timeout-tcp-inspect"} {
		d.Annotations = append(d.Annotations, none(prefix+k, "one idle timeout counts for both directions: use "+lbPrefix+"idle-timeout"))
	}
	return d
}
