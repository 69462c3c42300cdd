package dialect

import "fmt"

func tencentDialect() Dialect {
	const prefix = "service.kubernetes.io/"
	return Dialect{
		Name:     "Tencent Cloud",
		Source:   "https://github.com/kubernetes/website/blob/release-1.18/content/en/docs/concepts/services-networking/service.md",
		Prefixes: []string{prefix + "qcloud-", prefix + "tke-", prefix + "service.", prefix + "loadbalance-", prefix + "local-svc-"},
		Annotations: []Annotation{
			internal(prefix+"qcloud-loadbalancer-internal-subnetid", "112", nil, nil),
			text(prefix+"qcloud-loadbalancer-backends-label", "a set-based selector of nodes, as: key in (a, b)", FieldBackendNodes,
				setBackendNodes).of("142"),
			none(prefix+"tke-existed-lbid", "a load balancer is made for each Service; for an address that is there use "+LBAddresses+" or "+
				LBSharingKey).of("143"),
			none(prefix+"service.extensiveParameters", "they are parameters of Tencent's API for making an instance").of("144"),
			none(prefix+"service.listenerParameters", "they are parameters of Tencent's API for listeners").of("145"),
			none(prefix+"loadbalance-type", "there is one kind of load balancer, which does what both do").of("146"),
			none(prefix+"qcloud-loadbalancer-internet-charge-type", "it is not billed").of("147"),
			number(prefix+"qcloud-loadbalancer-internet-max-bandwidth-out", 1, 2000, "Mbit/s", FieldBandwidth, setBandwidth).of("148"),
			{Key: prefix + "local-svc-only-bind-node-with-pod", Values: "true, false", Behaviour: "149",
				Sets: []Field{FieldBackendNodes}, read: func(r *reader, v string) error {
					switch v {
					case "true":
						r.found(Applied, r.key, v, "connections go to Pods alone; with externalTrafficPolicy Local only nodes with one announce")
					case "false":
						r.found(Applied, r.key, v, "nodes without a Pod announce the address, too, unless externalTrafficPolicy is Local")
					default:
						return fmt.Errorf("%q is not one of true, false", shorten(v))
					}
					return nil
				}},
		},
	}
}
