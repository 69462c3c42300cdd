// Command bench measures fairlead beside the programs it can stand in for:
// kube-proxy, CoreDNS and the endpoint controllers of kube-controller-manager,
// all of them against the same API server in the same run. README.md says what
// each figure is and what to expect of it.
//
// It runs in network, mount and process namespaces of this run: no packet
// leaves them, and nothing it started outlives it.
package main
