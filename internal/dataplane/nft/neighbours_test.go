package nft

import (
	"testing"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
	"github.com/fairlead/fairlead/internal/testbed/flows"
)

// firewalld is the shape of firewalld's table: what comes in or passes is
// rejected, but for known connections and those that were translated.
const firewalld = `table inet firewalld {
	chain filter_INPUT {
		type filter hook input priority filter + 10; policy accept;
		ct state { established, related } accept
		ct status dnat accept
		iifname "lo" accept
		ct state invalid drop
		meta l4proto { icmp, ipv6-icmp } accept
		tcp dport 22 accept
		reject with icmpx admin-prohibited
	}
	chain filter_FORWARD {
		type filter hook forward priority filter + 10; policy accept;
		ct state { established, related } accept
		ct status dnat accept
		iifname "lo" accept
		ct state invalid drop
		meta l4proto ipv6-icmp accept
		reject with icmpx admin-prohibited
	}
	chain filter_OUTPUT {
		type filter hook output priority filter + 10; policy accept;
		ct state { established, related } accept
		oifname "lo" accept
	}
}
`

// docker is the shape of what dockerd writes by iptables: nothing passes but
// its own containers' packets.
const docker = `*nat
:DOCKER - [0:0]
-A PREROUTING -m addrtype --dst-type LOCAL -j DOCKER
-A POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE
COMMIT
*filter
:FORWARD DROP [0:0]
:DOCKER-USER - [0:0]
:DOCKER - [0:0]
-A FORWARD -j DOCKER-USER
-A FORWARD -o docker0 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A FORWARD -o docker0 -j DOCKER
-A FORWARD -i docker0 ! -o docker0 -j ACCEPT
-A DOCKER-USER -j RETURN
COMMIT
`

// rows are questions that are asked beside a neighbour.
func rows() []flows.Row {
	nodePort := []flows.Service{{Name: "web", Fronts: []flows.Front{{Kind: table.NodePort, To: "a d", Masquerade: true}}}}
	cluster := []flows.Service{{Name: "web", Fronts: []flows.Front{{Kind: table.ClusterIP, To: "a d"}}}}
	return []flows.Row{
		{Name: "node port", Services: nodePort, From: "client", To: "node", Want: flows.Want{Reach: "a d"}},
		{Name: "ClusterIP from the node", Services: cluster, From: "node", To: "cluster", Want: flows.Want{Reach: "a d", Client: "kept"}},
		{Name: "ClusterIP from a pod", Services: cluster, From: "c", To: "cluster", Want: flows.Want{Reach: "a d", Client: "kept"}},
		{Name: "hairpin", Services: []flows.Service{{Name: "web", Fronts: []flows.Front{{Kind: table.ClusterIP, To: "a"}}}}, From: "a",
			To: "cluster", Want: flows.Want{Reach: "a"}},
		{Name: "no endpoints", Services: []flows.Service{{Name: "web", Fronts: []flows.Front{{Kind: table.ClusterIP}}}}, From: "c", To: "cluster",
			Want: flows.Want{Refused: true}},
	}
}

func ask(t *testing.T, e *flows.Env, rows []flows.Row) {
	for i := range rows {
		t.Run(rows[i].Name, func(t *testing.T) {
			e.Apply(t, e.Table(svc.IPv4, svc.TCP, &rows[i]), nil)
			e.Forget(t)
			e.Check(t, svc.IPv4, svc.TCP, &rows[i])
		})
	}
}

// Beside firewalld Services work, and its table is as it was.
func TestBesideFirewalld(t *testing.T) {
	e := flows.NewEnv(t, create)
	var before, after string
	e.Node.Do(func() {
		flows.Command(t, firewalld, "nft", "-f", "-")
		before = flows.Command(t, "", "nft", "list", "table", "inet", "firewalld")
	})
	ask(t, e, rows())
	e.Node.Do(func() { after = flows.Command(t, "", "nft", "list", "table", "inet", "firewalld") })
	if before != after {
		t.Errorf("firewalld's table was\n%s\nis\n%s", before, after)
	}
}

// docker's policy drops what it does not know, whatever other tables accept: in
// nft mode the administrator says in docker's own chain that Services may pass,
// as docs/modes.md tells. Mode iptables does not need it.
func TestBesideDocker(t *testing.T) {
	e := flows.NewEnv(t, create)
	e.Node.Do(func() { flows.Command(t, docker, "iptables-restore", "--noflush") })
	single := rows()[0]
	single.Want = flows.Want{Dropped: true}
	ask(t, e, []flows.Row{single})
	e.Node.Do(func() {
		flows.Command(t, "", "iptables", "-I", "DOCKER-USER", "-m", "conntrack", "--ctstate", "DNAT", "-j", "ACCEPT")
	})
	ask(t, e, rows())
}
