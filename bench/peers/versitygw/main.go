// Versitygw is a gateway of S3 to a directory below the working directory. It takes the flags of bench/peers/s3, so that the tests
// of access logs can be run against it; `make test` does not, since it takes a minute to build.
package main

import (
	"context"
	"errors"
	"flag"
	"log"
	"os"
	"path/filepath"

	"github.com/versity/versitygw/backend/meta"
	"github.com/versity/versitygw/backend/posix"
	"github.com/versity/versitygw/embedgw"
)

func main() {
	listen := flag.String("listen", "127.0.0.1:7070", "address")
	cert := flag.String("cert", "", "file with the certificate, and the key, of the server")
	access := flag.String("access-key", "", "who may ask")
	secret := flag.String("secret-key", "", "and how that is proven")
	bucket := flag.String("bucket", "", "the bucket that there is")
	flag.Parse()
	if err := serve(*listen, *cert, *access, *secret, *bucket); err != nil {
		log.Fatal(err)
	}
}

func serve(listen, cert, access, secret, bucket string) error {
	if access == "" || secret == "" || bucket == "" {
		return errors.New("--access-key, --secret-key and --bucket are needed")
	}
	root, err := filepath.Abs("buckets") // of which each is a directory
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Join(root, bucket), 0o750); err != nil {
		return err
	}
	backend, err := posix.New(root, meta.XattrMeta{}, posix.PosixOpts{NewDirPerm: 0o750, Concurrency: 100})
	if err != nil {
		return err
	}
	return embedgw.RunVersityGW(context.Background(), backend, &embedgw.Config{
		RootUserAccess: access, RootUserSecret: secret, Region: "us-east-1", Ports: []string{listen}, CertFile: cert, KeyFile: cert,
		MaxConnections: 1000, MaxRequests: 1000, MultipartMaxParts: 10000, Quiet: true,
	})
}
