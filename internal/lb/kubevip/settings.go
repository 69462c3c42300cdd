package kubevip

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/svc"
)

// imageNames are how the names of kube-vip's images end; mirrors write the owner before them.
var imageNames = []string{"kube-vip", "kube-vip-iptables"}

// ContainerOf returns the container of kube-vip in a Pod, nil if there is none.
func ContainerOf(spec *corev1.PodSpec) *corev1.Container {
	i := slices.IndexFunc(spec.Containers, func(c corev1.Container) bool {
		image, _, _ := strings.Cut(c.Image, "@")
		name := image[strings.LastIndex(image, "/")+1:]
		name, _, _ = strings.Cut(name, ":")
		return slices.ContainsFunc(imageNames, func(end string) bool { return strings.HasSuffix(name, end) })
	})
	if i < 0 {
		return nil
	}
	return &spec.Containers[i]
}

// Settings returns a line for each variable in the environment of kube-vip's container, in the container's order: its counterpart in
// fairlead, or that it has none. Passwords are not shown, nor are variables that are not known here.
//
// Source: pkg/kubevip/config_envvar.go of kube-vip v1.0 and https://kube-vip.io/docs/installation/flags/.
func Settings(c *corev1.Container) (out []string) {
	s := settings{}
	for _, e := range c.Env {
		s[e.Name] = e // the last one counts, as for the kubelet
	}
	for i, e := range c.Env {
		if slices.ContainsFunc(c.Env[i+1:], func(later corev1.EnvVar) bool { return later.Name == e.Name }) {
			continue
		}
		meaning := s.meaning(e)
		shown := fmt.Sprintf("%q", e.Value)
		switch {
		case e.ValueFrom != nil:
			shown = "(from another object)"
		case e.Value == "":
		case e.Name == bgpPeerPassword, meaning == unknown:
			shown = "(not shown)"
		case e.Name == bgpPeers:
			shown = "(its passwords are not shown)"
		}
		out = append(out, e.Name+"="+shown+": "+meaning)
	}
	if len(c.EnvFrom) > 0 {
		out = append(out, "envFrom: the variables of other objects are not read here; look at them")
	}
	for _, a := range slices.Concat(c.Command, c.Args) {
		if strings.HasPrefix(a, "-") {
			flag, _, _ := strings.Cut(a, "=")
			out = append(out, fmt.Sprintf("the argument %q: arguments are not read here; look at what it sets", flag))
		}
	}
	return out
}

// The variables that others depend on.
const (
	vipARP, vipInterface, servicesInterface = "vip_arp", "vip_interface", "vip_servicesinterface"
	bgpEnable, bgpAS, bgpPeers              = "bgp_enable", "bgp_as", "bgp_peers"
	bgpPeerAddress, bgpPeerAS               = "bgp_peeraddress", "bgp_peeras"
	bgpPeerPassword, bgpMultihop            = "bgp_peerpass", "bgp_multihop"
)

// What many variables have in common.
const (
	ofControlPlane = "no counterpart: it is for the address of the control plane, which fairlead does not give. Keep kube-vip for it, " +
		"with svc_enable=false"
	ofElection = "no counterpart: nodes agree on who answers for each address without a Lease"
	ofEgress   = "no counterpart: fairlead does not choose the source addresses of Pods' own connections"
	ofTables   = "no counterpart: fairlead writes no routes for other programs. --lb-announce=bgp announces them, and with none others " +
		"route the addresses to the nodes"
	ofZebra  = "no counterpart: fairlead speaks BGP with the routers by itself"
	ofMPBGP  = "no counterpart: one session carries both families to a router that takes both"
	noEffect = "no effect: it is off"
	unset    = "no effect: it is empty"
	unknown  = "no setting of kube-vip that is known here; look at it"
)

// fixed are the meanings that do not depend on the value.
var fixed = map[string]string{
	"address": ofControlPlane, "vip_address": ofControlPlane, "port": ofControlPlane, "cp_namespace": ofControlPlane,
	"cp_detect": ofControlPlane, "vip_ddns": ofControlPlane, "dns_mode": ofControlPlane, "kubernetes_addr": ofControlPlane,
	"lb_port": ofControlPlane, "lb_fwdmethod": ofControlPlane, "backend_health_check_interval": ofControlPlane,

	"vip_leaderelection": ofElection, "vip_leasename": ofElection, "vip_leaseduration": ofElection, "vip_renewdeadline": ofElection,
	"vip_retryperiod": ofElection, "vip_leaseannotations": ofElection, "svc_leasename": ofElection, "svc_election": ofElection,
	"vip_nodename": ofElection, "vip_singlenode": ofElection, "vip_startleader": ofElection,

	"egress_podcidr": ofEgress, "egress_servicecidr": ofEgress, "egress_withnftables": ofEgress, "egress_clean": ofEgress,

	"vip_routingtableid": ofTables, "vip_routingtabletype": ofTables, "vip_routingprotocol": ofTables, "vip_cleanroutingtable": ofTables,
	"zebra_url": ofZebra, "zebra_version": ofZebra, "zebra_software_name": ofZebra,
	"mpbgp_nexthop": ofMPBGP, "mpbgp_ipv4": ofMPBGP, "mpbgp_ipv6": ofMPBGP,

	"vip_arpRate":           "no counterpart: a node announces an address when it takes it over",
	"vip_interfaceloglobal": "no counterpart: fairlead gives no interface the addresses",
	"vip_loglevel":          "no counterpart: the log of fairlead has the level of its flags",
	"annotation":            "no counterpart: a BGPPeer names its router, and no annotation of a Node does",
	"bgp_routerid":          "no counterpart: the router ID of a node is its first internal IPv4 address",
	"bgp_routerinterface":   "no counterpart: the router ID of a node is its first internal IPv4 address",
	bgpAS:                   "spec.localASN of each BGPPeer",
	"bgp_sourceip":          "spec.sourceAddress of each BGPPeer",
	"bgp_sourceif":          "no counterpart: spec.sourceAddress of a BGPPeer takes an address",
	"svc_namespace": "no counterpart: fairlead lb serves the Services of all namespaces. spec.namespaces of an IPAddressPool restricts " +
		"which ones get its addresses",
	"lb_class_name": "no counterpart: the class of fairlead is " + svc.LoadBalancerClass + ", and the class of a Service cannot be changed",
	"lb_class_legacy_handling": "no counterpart: Services without a class are served, and with --lb-default=false the ones of class " +
		svc.LoadBalancerClass,
	"enable_node_labeling":    "no counterpart: 'fairlead lb status' shows the node of each address",
	"enable_service_security": "no counterpart: no node has the addresses of Services as its own",
	"prometheus_server":       "no counterpart: the manifest of fairlead lb has the port of its metrics",
	"health_check_port":       "no counterpart: the manifest of fairlead lb has the port of its probes",
	"k8s_config_file":         "no counterpart: fairlead lb has the account of its Pod, or --kubeconfig",
	"config_file":             "the file is not read here; look at it",
	"disable_service_updates": "no counterpart: fairlead writes the address into the status of the Service",
	"enable_endpoints":        "no counterpart: fairlead reads EndpointSlices",
	"mirror_dest_interface":   "no counterpart: fairlead does not mirror packets to an interface",
	"iptables_backend":        "no counterpart: fairlead lb writes no rules of iptables",
	"enable_upnp":             "no counterpart: fairlead does not configure routers by UPnP",
}

// switches are what variables mean that are on; off they have no effect.
var switches = map[string]string{
	vipARP:             "--lb-announce=arp, which is the default",
	bgpEnable:          "--lb-announce=bgp, and a BGPPeer for each router",
	"vip_routingtable": ofTables,
	"vip_wireguard":    "no counterpart: fairlead does not announce addresses by WireGuard",
	"zebra_enable":     ofZebra,
	"cp_enable":        ofControlPlane,
	"lb_enable":        ofControlPlane,
	"lb_class_only":    "--lb-default=false; then only Services of class " + svc.LoadBalancerClass + " are served",
}

// settings are the variables of a container.
type settings map[string]corev1.EnvVar

// on reports whether a variable is true for kube-vip.
func (s settings) on(name string) bool { return isTrue(s[name].Value) }

// isTrue reports whether kube-vip, which asks strconv.ParseBool, takes a text as true.
func isTrue(text string) bool {
	is, err := strconv.ParseBool(text)
	return err == nil && is
}

func (s settings) meaning(e corev1.EnvVar) string {
	if e.Value == "" && e.ValueFrom == nil {
		return unset // kube-vip's own manifests have empty variables
	}
	if text, ok := fixed[e.Name]; ok {
		return text
	}
	text, isSwitch := switches[e.Name]
	switch {
	case e.ValueFrom != nil && e.Name != bgpPeerPassword:
		return "its value is not in the DaemonSet; look at it"
	case isSwitch && !s.on(e.Name):
		return noEffect
	case e.Name == vipARP && s.on(bgpEnable):
		return "no effect: with bgp_enable, kube-vip announces by BGP only" // Manager.Start
	case isSwitch:
		return text
	}
	switch e.Name {
	case "svc_enable":
		if s.on(e.Name) {
			return "fairlead lb, which serves the Services of type LoadBalancer"
		}
		return "kube-vip serves no Services: fairlead lb has none to take over"
	case vipInterface, servicesInterface:
		return s.iface(e)
	case "vip_cidr", "vip_subnet":
		return "no counterpart: like kube-vip, fairlead announces each address by itself" // kube-vip's BGP drops the length
	case bgpPeerAddress, bgpPeerAS, bgpPeerPassword, bgpMultihop:
		return s.onePeer(e)
	case bgpPeers:
		return s.peers(e.Value)
	case "bgp_hold_time":
		return "spec.holdTime: " + e.Value + "s of each BGPPeer"
	case "bgp_keepalive_interval":
		return "spec.keepaliveTime: " + e.Value + "s of each BGPPeer"
	}
	return unknown
}

func (s settings) iface(e corev1.EnvVar) string {
	switch {
	case e.Name == vipInterface && s[servicesInterface].Value != "":
		return ofControlPlane
	case !s.on(vipARP) || s.on(bgpEnable):
		return "no effect: without ARP no interface answers for addresses, and fairlead gives none of them the addresses"
	}
	return fmt.Sprintf("--lb-interface=%s, or spec.interfaces: [%s] of an IPAddressPool; without it, the interface whose network has the "+
		"address", e.Value, e.Value)
}

// onePeer is what a variable of one router means, which kube-vip has beside the list of routers.
func (s settings) onePeer(e corev1.EnvVar) string {
	if a := s[bgpPeerAddress]; a.Value == "" && a.ValueFrom == nil {
		return "no effect without " + bgpPeerAddress
	}
	switch e.Name {
	case bgpPeerAddress:
		return "spec.address of a BGPPeer"
	case bgpPeerAS:
		return "spec.peerASN of that BGPPeer"
	case bgpPeerPassword:
		return "a Secret of kube-system, whose key password it is, in spec.passwordSecretRef of that BGPPeer"
	}
	if s.on(bgpMultihop) {
		return "spec.ebgpMultihop of that BGPPeer: the number of hops, 2 to 255"
	}
	return noEffect
}

// peers reads ADDRESS:AS:PASSWORD:MULTIHOP:PORT with commas between. Behind a slash or a further colon are settings of a newer kube-vip.
//
// Source: ParseBGPPeerConfig of kube-vip, in pkg/kubevip/config_bgp.go.
func (s settings) peers(value string) string {
	var out []string
	for text := range strings.SplitSeq(value, ",") {
		if text = strings.TrimSpace(text); text == "" {
			continue
		}
		address, rest, bracket := strings.Cut(strings.TrimPrefix(text, "["), "]:")
		if !bracket {
			address, rest, _ = strings.Cut(text, ":")
		}
		part := append(strings.Split(rest, ":"), "", "", "", "")
		if _, err := netip.ParseAddr(address); err != nil || part[0] == "" {
			out = append(out, "a router that is not ADDRESS:AS:PASSWORD:MULTIHOP; look at it")
			continue
		}
		line := fmt.Sprintf("a BGPPeer with spec.address: %q and spec.peerASN: %s", address, number(part[0]))
		if part[1] != "" {
			line += ", and a Secret of kube-system with its password in spec.passwordSecretRef"
		}
		hops, newer, _ := strings.Cut(part[2], "/")
		if isTrue(hops) {
			line += ", and spec.ebgpMultihop: the number of hops, 2 to 255"
		}
		if part[3] != "" {
			line += ", and spec.port: " + number(part[3])
		}
		if newer != "" || strings.Trim(strings.Join(part[4:], ""), " ") != "" || strings.Contains(hops, ";") {
			line += ". Its further settings are not read here; look at them"
		}
		out = append(out, line)
	}
	if len(out) == 0 {
		return "no effect: there is no router"
	}
	return strings.Join(out, "; ")
}

// number is a text if it has digits only: what else is between colons may be part of a password.
func number(text string) string {
	if strings.Trim(text, "0123456789") != "" {
		return "(no number)"
	}
	return text
}
