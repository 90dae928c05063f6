// Ranged GETs by Go's net/http: into one slice, or into files of a folder as downloaders written in Go do.
//
//	netbench-go [-connections N] [-request BYTES] [-folder FOLDER] URL...
//
// It prints seconds, processor seconds and bytes as JSON. Sizes are asked for before the clock starts, as the bare loop
// does. With -folder that is part of the time, because a downloader has to ask too. Certificates: SSL_CERT_FILE.
package main

import (
	"crypto/tls"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"path"
	"path/filepath"
	"sync"
	"syscall"
	"time"
)

type piece struct {
	url         string
	first, last int64
	into        []byte
	file        *os.File
}

func main() {
	connections := flag.Int("connections", 16, "goroutines, one connection each")
	request := flag.Int64("request", 16<<20, "bytes of a request")
	folder := flag.String("folder", "", "write files into this folder")
	flag.Parse()
	if err := run(*connections, *request, *folder, flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, "netbench-go:", err)
		os.Exit(1)
	}
}

func run(connections int, request int64, folder string, urls []string) error {
	client := &http.Client{Transport: &http.Transport{
		MaxConnsPerHost:     connections,
		MaxIdleConnsPerHost: connections,
		DisableCompression:  true,
		ReadBufferSize:      256 << 10,
		// HTTP/1.1 only: one connection for each request
		TLSNextProto: map[string]func(string, *tls.Conn) http.RoundTripper{},
	}}
	begun, before := time.Now(), processorTime()
	pieces, total, err := planned(client, request, folder, urls)
	if err != nil {
		return err
	}
	if folder == "" {
		memory := make([]byte, total)
		at := int64(0)
		for i := range pieces {
			length := pieces[i].last - pieces[i].first + 1
			pieces[i].into = memory[at : at+length]
			at += length
		}
		begun, before = time.Now(), processorTime()
	}
	queue := make(chan piece, len(pieces))
	for _, one := range pieces {
		queue <- one
	}
	close(queue)
	failed := make(chan error, connections)
	var group sync.WaitGroup
	for range make([]struct{}, connections) {
		group.Add(1)
		go func() {
			defer group.Done()
			buffer := make([]byte, 256<<10)
			for one := range queue {
				if err := fetch(client, one, buffer); err != nil {
					failed <- err
					return
				}
			}
		}()
	}
	group.Wait()
	select {
	case err := <-failed:
		return err
	default:
	}
	return json.NewEncoder(os.Stdout).Encode(map[string]any{
		"seconds": time.Since(begun).Seconds(),
		"cpu_s":   processorTime() - before,
		"bytes":   total,
	})
}

// planned asks for the sizes, and cuts the files into pieces.
func planned(client *http.Client, request int64, folder string, urls []string) ([]piece, int64, error) {
	var pieces []piece
	total := int64(0)
	for _, url := range urls {
		answer, err := client.Head(url)
		if err != nil {
			return nil, 0, err
		}
		answer.Body.Close()
		if answer.StatusCode != http.StatusOK || answer.ContentLength < 0 {
			return nil, 0, fmt.Errorf("%s: %s, %d bytes", url, answer.Status, answer.ContentLength)
		}
		var file *os.File
		if folder != "" {
			if file, err = os.Create(filepath.Join(folder, path.Base(url))); err != nil {
				return nil, 0, err
			}
		}
		for first := int64(0); first < answer.ContentLength; first += request {
			last := min(first+request, answer.ContentLength) - 1
			pieces = append(pieces, piece{url: url, first: first, last: last, file: file})
		}
		total += answer.ContentLength
	}
	return pieces, total, nil
}

func fetch(client *http.Client, one piece, buffer []byte) error {
	ask, err := http.NewRequest(http.MethodGet, one.url, nil)
	if err != nil {
		return err
	}
	ask.Header.Set("Range", fmt.Sprintf("bytes=%d-%d", one.first, one.last))
	answer, err := client.Do(ask)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	length := one.last - one.first + 1
	if answer.StatusCode != http.StatusPartialContent || answer.ContentLength != length {
		return fmt.Errorf("%s: %s, %d bytes", one.url, answer.Status, answer.ContentLength)
	}
	if one.file == nil {
		_, err = io.ReadFull(answer.Body, one.into)
		return err
	}
	_, err = io.CopyBuffer(io.NewOffsetWriter(one.file, one.first), struct{ io.Reader }{answer.Body}, buffer)
	return err
}

func processorTime() float64 {
	var usage syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage); err != nil {
		return 0
	}
	return float64(usage.Utime.Nano()+usage.Stime.Nano()) / 1e9
}
