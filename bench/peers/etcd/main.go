// Command etcd is the published etcd, built here as the store that fairlead and
// kube-apiserver share while they are compared.
package main

import (
	"os"

	"go.etcd.io/etcd/server/v3/etcdmain"
)

func main() {
	etcdmain.Main(os.Args)
}
