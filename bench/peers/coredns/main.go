// Command coredns is the published CoreDNS with the plugins of a Kubernetes
// cluster, built here as the peer that fairlead is measured against.
package main

import (
	_ "github.com/coredns/coredns/core/plugin"
	"github.com/coredns/coredns/coremain"
)

func main() {
	coremain.Run()
}
