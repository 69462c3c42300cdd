// S3 is a server of S3 for tests, of the library with which "rclone serve s3" answers: it verifies signatures and keeps
// objects in memory. peers/versitygw has the same flags, and a gateway to a directory.
package main

import (
	"context"
	"crypto/tls"
	"errors"
	"flag"
	"fmt"
	"log"
	"net"
	"net/http"
	"time"

	"github.com/rclone/gofakes3"
	"github.com/rclone/gofakes3/s3mem"
)

func main() {
	listen := flag.String("listen", "127.0.0.1:0", "address")
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
	backend := s3mem.New()
	if err := backend.CreateBucket(context.Background(), bucket); err != nil {
		return err
	}
	pair, err := tls.LoadX509KeyPair(cert, cert)
	if err != nil {
		return err
	}
	l, err := net.Listen("tcp", listen)
	if err != nil {
		return err
	}
	server := http.Server{
		Handler:           gofakes3.New(backend, gofakes3.WithV4Auth(map[string]string{access: secret})).Server(),
		ReadHeaderTimeout: time.Minute, TLSConfig: &tls.Config{Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS12},
	}
	fmt.Println(l.Addr())
	return server.ServeTLS(l, "", "")
}
