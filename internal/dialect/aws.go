package dialect

import (
	"fmt"
	"net/netip"
	"strings"
)

// awsPrefix begins the annotations of the AWS cloud provider and of the AWS Load Balancer Controller.
const awsPrefix = "service.beta.kubernetes.io/aws-load-balancer-"

const (
	noVPC        = "there are no subnets, security groups and addresses of AWS; addresses come from IPAddressPools"
	noRouteTable = "packets reach the load balancer by ARP, NDP or BGP"
	noCapacity   = "capacity is that of the nodes, which are not billed"
)

func setTrusted(s *Spec, p []netip.Prefix) { s.TrustedFronts = p }

func awsDialect() Dialect {
	return Dialect{
		Name: "AWS", Source: "https://github.com/kubernetes/cloud-provider-aws/blob/master/docs/service_controller.md",
		Prefixes: []string{awsPrefix, "service.kubernetes.io/aws-load-balancer-", "elbv2.k8s.aws/"},
		Annotations: append(awsClassic(),
			// Those of the AWS Load Balancer Controller:
			// https://kubernetes-sigs.github.io/aws-load-balancer-controller/latest/guide/service/annotations/
			internal(awsPrefix+"scheme", "", []string{"internal"}, []string{"internet-facing"}),
			backends(awsPrefix+"nlb-target-type", "ip", "instance"),
			none(awsPrefix+"name", "a load balancer is named by its Service"),
			later(awsPrefix+"proxy-protocol-per-target-group", "ports with commas between", FieldProxyProtocol,
				"the PROXY protocol is for all ports or none, by "+lbPrefix+"proxy-protocol"),
			none(awsPrefix+"ip-address-type", "spec.ipFamilies says it"),
			codes(awsPrefix+"healthcheck-success-codes", "statuses, as 200-399"),
			none(awsPrefix+"eip-allocations-discovery-tags", noVPC), none(awsPrefix+"ipv6-addresses", noVPC),
			alpnPolicy(awsPrefix+"alpn-policy"),
			Annotation{Key: awsPrefix + "attributes", Values: "key=value pairs with commas between",
				Sets: []Field{FieldCrossZone, FieldLogEnabled, FieldLogBucket, FieldLogPrefix},
				read: readAWSAttributes},
			none(awsPrefix+"manage-backend-security-group-rules", noVPC), none(awsPrefix+"inbound-sg-rules-on-private-link-traffic", noVPC),
			none(awsPrefix+"security-group-prefix-lists", noVPC), none(awsPrefix+"disable-nlb-sg", noVPC),
			none(awsPrefix+"listener-attributes*", "listeners have no other attributes than the ones in this table"),
			none(awsPrefix+"multi-cluster-target-group", "a load balancer is of one cluster"),
			none(awsPrefix+"enable-prefix-for-ipv6-source-nat", noVPC), none(awsPrefix+"source-nat-ipv6-prefixes", noVPC),
			none(awsPrefix+"minimum-load-balancer-capacity", noCapacity),
			none(awsPrefix+"enable-icmp-for-path-mtu-discovery", "nodes answer and take ICMP as they are configured"),
			none(awsPrefix+"enable-tcp-udp-listener", "a Service may have ports of both protocols as it is"),
			none(awsPrefix+"quic-enabled-ports", "UDP is carried as it is"), none(awsPrefix+"quic-enabled-containers", "UDP is carried as it is"),
			none("elbv2.k8s.aws/checkpoint", "it is what the AWS Load Balancer Controller records for itself"),
			none("elbv2.k8s.aws/checkpoint-timestamp", "it is what the AWS Load Balancer Controller records for itself"),
			prefixes("service.beta.kubernetes.io/load-balancer-source-ranges", FieldSourceRanges,
				func(s *Spec, p []netip.Prefix) { s.SourceRanges = p }).of("101"),
		),
	}
}

// awsClassic are the annotations of the AWS cloud provider (k8s.io/cloud-provider-aws, pkg/providers/v1/aws.go).
func awsClassic() []Annotation {
	return []Annotation{
		{Key: awsPrefix + "type", Values: "nlb, nlb-ip, external, nlb-target-ip", Sets: []Field{FieldHealthInterval}, Behaviour: "136",
			read: func(r *reader, v string) error {
				switch v {
				case "nlb", "nlb-ip", "external", "nlb-target-ip":
					r.Spec.NLB = true
					r.found(Applied, r.key, v, "health checks have the defaults of a Network Load Balancer, and nodes its rules")
					return nil
				}
				return fmt.Errorf("%q is not one of nlb, nlb-ip, external, nlb-target-ip", shorten(v))
			}},
		internal(awsPrefix+"internal", "108", nil, nil),
		{Key: awsPrefix + "proxy-protocol", Values: "*", Sets: []Field{FieldProxyProtocol}, Behaviour: "121", read: func(r *reader,
			v string) error {
			if v != "*" {
				return fmt.Errorf("%q is not *, the only value that is allowed", shorten(v))
			}
			// A Classic Load Balancer sends version 1, a Network Load Balancer version 2.
			version := 1
			if r.Spec.NLB {
				version = 2
			}
			r.set(FieldProxyProtocol, fmt.Sprintf("v%d", version), func(s *Spec) { s.ProxyProtocol = version })
			return nil
		}},
		flag(awsPrefix+"access-log-enabled", FieldLogEnabled, false, setLogs).of("122"),
		logInterval(awsPrefix + "access-log-emit-interval").of("123"),
		logBucket(awsPrefix + "access-log-s3-bucket-name").of("124"),
		logPrefix(awsPrefix + "access-log-s3-bucket-prefix").of("125"),
		flag(awsPrefix+"connection-draining-enabled", FieldDraining, true, setDraining).of("126"),
		seconds(awsPrefix+"connection-draining-timeout", 1, 3600, FieldDrainTimeout, setDrain).of("127"),
		seconds(awsPrefix+"connection-idle-timeout", 1, 4000, FieldIdleTimeout, setIdle).of("128"),
		flag(awsPrefix+"cross-zone-load-balancing-enabled", FieldCrossZone, true, setCrossZone).of("129"),
		none(awsPrefix+"extra-security-groups", noVPC).of("135"),
		none(awsPrefix+"security-groups", noVPC),
		certificates(awsPrefix+"ssl-cert",
			"names of TLS Secrets of the namespace, or ARNs whose last component is one, with commas between", "arn:").of("115"),
		{Key: awsPrefix + "ssl-ports", Values: "ports by number or name with commas between, or *", Sets: []Field{FieldTLSPorts},
			Behaviour: "119",
			read:      readTLSPorts},
		tlsPolicy(awsPrefix+"ssl-negotiation-policy", "120"),
		{Key: awsPrefix + "backend-protocol", Values: "http, https, ssl, tcp", Sets: []Field{FieldBackend}, Behaviour: "116, 117, 118",
			read: func(r *reader, v string) error {
				p, ok := map[string]Protocol{"http": HTTP, "https": HTTPS, "ssl": TLS, "tcp": TCP}[strings.ToLower(v)]
				if !ok {
					return fmt.Errorf("%q is not one of http, https, ssl, tcp", shorten(v))
				}
				r.set(FieldBackend, strings.ToLower(v), func(*Spec) { r.raw.offered = p })
				return nil
			}},
		tags(awsPrefix + "additional-resource-tags").of("130"),
		word(awsPrefix+"healthcheck-protocol", map[string]Protocol{"tcp": TCP, "http": HTTP, "https": HTTPS, "ssl": TCP}, FieldHealthProtocol,
			TCP,
			setHealth),
		{Key: awsPrefix + "healthcheck-port", Values: "1 to 65535, or traffic-port", Sets: []Field{FieldHealthPort}, read: func(r *reader,
			v string) error {
			if v == "traffic-port" {
				r.same(FieldHealthPort, v)
				return nil
			}
			n, err := parseNumber(v, 1, 65535, "")
			if err == nil {
				r.set(FieldHealthPort, v, func(s *Spec) { setHealthPort(s, n) })
			}
			return err
		}},
		path(awsPrefix + "healthcheck-path"),
		number(awsPrefix+"healthcheck-healthy-threshold", 2, 10, "", FieldHealthHealthy, setHealthy).of("131"),
		number(awsPrefix+"healthcheck-unhealthy-threshold", 2, 10, "", FieldHealthUnhealthy, setUnhealthy).of("132"),
		seconds(awsPrefix+"healthcheck-timeout", 2, 60, FieldHealthTimeout, setTimeout).of("134"),
		seconds(awsPrefix+"healthcheck-interval", 5, 300, FieldHealthInterval, setInterval).of("133"),
		{Key: awsPrefix + "target-group-attributes", Values: "key=value pairs with commas between", Sets: []Field{FieldProxyProtocol,
			FieldBalance, FieldDrainTimeout, FieldSlowStart, FieldStickyCookie, FieldStickyApp, FieldStickyLifetime},
			read: readAWSTargetGroup},
		none(awsPrefix+"eip-allocations", noVPC),
		addresses(awsPrefix+"private-ipv4-addresses", 4),
		nodeSelector(awsPrefix+"target-node-labels", "key=value pairs with commas between"),
		none(awsPrefix+"subnets", noVPC),
	}
}

// readTLSPorts reads ports by number or name; * stands for all.
func readTLSPorts(r *reader, v string) error {
	r.raw.tlsPortsBy = Origin{r.key, v}
	if v == "*" {
		r.same(FieldTLSPorts, "all")
		return nil
	}
	var ports []string
	for p := range strings.SplitSeq(v, ",") {
		if p = strings.TrimSpace(p); p != "" {
			ports = append(ports, p)
		}
	}
	r.set(FieldTLSPorts, v, func(*Spec) { r.raw.tlsPorts = ports })
	return nil
}

// readAWSTargetGroup reads attributes of a target group:
// https://docs.aws.amazon.com/elasticloadbalancing/latest/network/edit-target-group-attributes.html
func readAWSTargetGroup(r *reader, v string) error {
	pairs, err := parseTags(v)
	if err != nil {
		return err
	}
	for _, k := range strings.Split(sortedKeys(pairs), ", ") {
		switch value := pairs[k]; k {
		case "proxy_protocol_v2.enabled":
			if value == "true" {
				r.set(FieldProxyProtocol, "v2", func(s *Spec) { s.ProxyProtocol = 2 })
			} else {
				r.same(FieldProxyProtocol, "none")
			}
		case "stickiness.enabled":
			err = r.awsStickiness(value == "true", pairs)
		case "stickiness.type", "stickiness.lb_cookie.duration_seconds", "stickiness.app_cookie.cookie_name",
			"stickiness.app_cookie.duration_seconds": // with stickiness.enabled
			if pairs["stickiness.enabled"] != "true" {
				r.found(Applied, r.key, value, k+": stickiness is off, as by default")
			}
		case "load_balancing.algorithm.type":
			balance, ok := map[string]Balance{"round_robin": RoundRobin, "least_outstanding_requests": LeastConnections,
				"weighted_random": RandomOfTwo}[value]
			if !ok {
				return fmt.Errorf("%s: %q is not one of round_robin, least_outstanding_requests, weighted_random", k, shorten(value))
			}
			r.set(FieldBalance, string(balance), func(s *Spec) { s.Balance = balance })
		case "slow_start.duration_seconds":
			n, err := parseNumber(value, 0, 900, "seconds")
			if err != nil {
				return fmt.Errorf("%s: %w", k, err)
			}
			if n > 0 {
				r.set(FieldSlowStart, value+" seconds", func(s *Spec) { s.SlowStart = Duration(n) * 1e9 })
			} else {
				r.same(FieldSlowStart, "none")
			}
		case "deregistration_delay.timeout_seconds":
			n, err := parseNumber(value, 0, 3600, "seconds")
			if err != nil {
				return fmt.Errorf("%s: %w", k, err)
			}
			r.set(FieldDrainTimeout, value+" seconds", func(s *Spec) { s.DrainTimeout, s.Draining = Duration(n)*1e9, n > 0 })
		default:
			r.found(Meaningless, r.key, value,
				"accepted; "+shorten(k)+" has no meaning here because connections are handled by the nodes themselves")
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// readAWSAttributes reads attributes of a load balancer.
func readAWSAttributes(r *reader, v string) error {
	pairs, err := parseTags(v)
	if err != nil {
		return err
	}
	for _, k := range strings.Split(sortedKeys(pairs), ", ") {
		switch on := pairs[k] == "true"; {
		case k == "load_balancing.cross_zone.enabled" && !on:
			r.set(FieldCrossZone, "false", func(s *Spec) { s.CrossZone = false })
		case k == "access_logs.s3.enabled" && on:
			r.set(FieldLogEnabled, "true", func(s *Spec) { s.AccessLog.Enabled = true })
		case k == "access_logs.s3.bucket":
			if err := r.setBucket(pairs[k]); err != nil {
				return fmt.Errorf("%s: %w", k, err)
			}
		case k == "access_logs.s3.prefix" && pairs[k] != "":
			if err := r.setPrefix(pairs[k]); err != nil {
				return fmt.Errorf("%s: %w", k, err)
			}
		default:
			r.found(Meaningless, r.key, pairs[k], "accepted; "+shorten(k)+" has no meaning here because "+noVPC)
		}
	}
	return nil
}
