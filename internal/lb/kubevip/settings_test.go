package kubevip_test

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"github.com/fairlead/fairlead/internal/lb/kubevip"
)

// Each variable of kube-vip's container has its meaning, which may depend on others; passwords are not shown.
func TestSettings(t *testing.T) {
	for _, c := range []struct{ env, want string }{
		{"{name: vip_arp, value: 'true'}", `vip_arp="true": --lb-announce=arp`},
		{"{name: vip_arp, value: 'false'}", `vip_arp="false": no effect`},
		{"{name: vip_arp, value: 'true'}, {name: bgp_enable, value: '1'}", `bgp_enable="1": --lb-announce=bgp`},
		{"{name: bgp_enable, value: '1'}, {name: vip_arp, value: 'true'}", `vip_arp="true": no effect: with bgp_enable`},
		{"{name: bgp_enable, value: 'true'}", `bgp_enable="true": --lb-announce=bgp`},
		{"{name: vip_arp, value: 'false'}, {name: vip_arp, value: 'true'}", `vip_arp="true": --lb-announce=arp`},
		{"{name: vip_arp, valueFrom: {fieldRef: {fieldPath: x}}}", "vip_arp=(from another object): its value is not in the DaemonSet"},
		{"{name: vip_interface, value: eth0}, {name: vip_arp, value: 'true'}", `--lb-interface=eth0, or spec.interfaces: [eth0]`},
		{"{name: vip_interface, value: eth0}, {name: vip_servicesinterface, value: eth1}",
			`vip_interface="eth0": no counterpart: it is for the address of the control plane`},
		{"{name: vip_interface, value: lo}, {name: bgp_enable, value: 'true'}", `vip_interface="lo": no effect: without ARP`},
		{"{name: vip_subnet, value: '/24,/64'}", "fairlead announces each address by itself"},
		{"{name: svc_enable, value: 'true'}", "fairlead lb, which serves"},
		{"{name: svc_enable, value: 'false'}", "has none to take over"},
		{"{name: cp_enable, value: 'true'}", "Keep kube-vip for it, with svc_enable=false"},
		{"{name: lb_enable, value: 'true'}", `lb_enable="true": no counterpart`},
		{"{name: lb_class_only, value: 'true'}", "--lb-default=false"},
		{"{name: bgp_as, value: '65000'}", `bgp_as="65000": spec.localASN`},
		{"{name: bgp_peeraddress, value: 192.0.2.1}", "spec.address of a BGPPeer"},
		{"{name: bgp_peeraddress, value: 192.0.2.1}, {name: bgp_peers, value: '192.0.2.2:1::false'}",
			"spec.address of a BGPPeer"},
		{"{name: bgp_peeraddress, value: ''}, {name: bgp_peeras, value: '1'}", `bgp_peeraddress="": no effect: it is empty`},
		{"{name: bgp_peeraddress, value: ''}, {name: bgp_peeras, value: '1'}", `bgp_peeras="1": no effect without bgp_peeraddress`},
		{"{name: bgp_peerpass, value: ''}", `bgp_peerpass="": no effect: it is empty`},
		{"{name: bgp_peerpass, value: hidden}, {name: bgp_peeraddress, value: 192.0.2.1}", "bgp_peerpass=(not shown): a Secret of kube-system"},
		{"{name: bgp_peers, value: '192.0.2.2:65001:hidden:true/x'}", `a BGPPeer with spec.address: "192.0.2.2" and spec.peerASN: 65001, and a ` +
			"Secret of kube-system with its password in spec.passwordSecretRef, and spec.ebgpMultihop"},
		{"{name: bgp_peers, value: '192.0.2.2:65001::false,[2001:db8::1]:65002::false'}", `spec.peerASN: 65001; a BGPPeer with spec.address: ` +
			`"2001:db8::1" and spec.peerASN: 65002`},
		{"{name: bgp_peers, value: '192.0.2.2:65001::True:1179'}", "spec.ebgpMultihop: the number of hops, 2 to 255, and spec.port: 1179"},
		{"{name: bgp_peers, value: '192.0.2.2:65001::true;300;300;3'}", "Its further settings are not read here"},
		{"{name: bgp_peers, value: '192.0.2.2:65001::1:179:x'}", "spec.port: 179. Its further settings are not read here"},
		{"{name: bgp_peers, value: '192.0.2.2:hidden::'}", "spec.peerASN: (no number)"},
		{"{name: bgp_peers, value: hidden}", "a router that is not ADDRESS:AS:PASSWORD:MULTIHOP"},
		{"{name: bgp_hold_time, value: '30'}", "spec.holdTime: 30s of each BGPPeer"},
		{"{name: vip_leaderelection, value: 'true'}", "without a Lease"},
		{"{name: bgp_routerid, valueFrom: {fieldRef: {fieldPath: x}}}", "bgp_routerid=(from another object): no counterpart"},
		{"{name: PACKET_AUTH_TOKEN, value: hidden}", "PACKET_AUTH_TOKEN=(not shown): no setting of kube-vip that is known here"},
	} {
		var container corev1.Container
		if err := yaml.UnmarshalStrict([]byte("env: ["+c.env+"]"), &container); err != nil {
			t.Fatal(err)
		}
		got := strings.Join(kubevip.Settings(&container), "\n")
		if !strings.Contains(got, c.want) || strings.Contains(got, "hidden") {
			t.Errorf("%s:\n%s\nwant %s", c.env, got, c.want)
		}
	}
	got := kubevip.Settings(&corev1.Container{Args: []string{"manager", "--bgppeers=hidden"}, EnvFrom: []corev1.EnvFromSource{{}}})
	if text := strings.Join(got, "\n"); len(got) != 2 || !strings.Contains(text, `"--bgppeers": arguments are not read`) {
		t.Errorf("arguments: %q", got)
	}
	for image, want := range map[string]bool{
		"ghcr.io/kube-vip/kube-vip:v1.0.1": true, "localhost:5000/kube-vip": true, "a/kube-vip@sha256:0": true,
		"ghcr.io/kube-vip/kube-vip-iptables:v0.6.0": true, "rancher/mirrored-kube-vip-kube-vip-iptables:v0.6.0": true,
		"a/kube-vip-cloud-provider:v1": false,
	} {
		if got := kubevip.ContainerOf(&corev1.PodSpec{Containers: []corev1.Container{{}, {Image: image}}}); (got != nil) != want {
			t.Errorf("%s: %v", image, got)
		}
	}
}
